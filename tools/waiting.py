"""Wait for a condition in tests, proofs and benches. The bound is there to fail, and to report what did not come; it
measures nothing."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

PATIENCE_S = 60.0
LOOK_EVERY_S, LOOK_EVERY_ASYNC_S = 0.02, 0.002


def wait_for(condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = "") -> Any:
    """Look until `condition()` is true, and return its value. AssertionError after `timeout_s` without it."""
    ends_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > ends_s:
            raise AssertionError(f"{what or words_of(condition)}: not within {timeout_s:g} s")
        time.sleep(LOOK_EVERY_S)
    return value


async def wait_for_async(
    condition: Callable[[], Awaitable[Any] | Any], timeout_s: float = PATIENCE_S, what: str = ""
) -> Any:
    """`wait_for` in an event loop; other work goes on between looks. The result of `condition()` may be awaitable."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if value := await value if isinstance(value, Awaitable) else value:
                    return value
                await asyncio.sleep(LOOK_EVERY_ASYNC_S)
    except TimeoutError as error:
        raise AssertionError(f"{what or words_of(condition)}: not within {timeout_s:g} s") from error


def words_of(condition: Callable[..., Any]) -> str:
    """Name a condition: a lambda by its source line."""
    name = str(getattr(condition, "__qualname__", repr(condition)))
    if name.endswith("<lambda>"):
        try:
            return " ".join(inspect.getsource(condition).split())
        except OSError:
            return name
    return name
