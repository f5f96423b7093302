"""One new request in a few turns of the loop, tenants in turn, and a bound on those that wait."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import pytest

from tandem.core.errors import CapacityError
from tandem.router.api.request_pacing import BURST, EACH_S, TURNS, RequestPacer


def looped(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop."""
    return functools.wraps(test)(lambda: asyncio.run(test()))


async def _let_in(
    intake: RequestPacer, tenants: Sequence[str]
) -> tuple[list[tuple[int, str]], list[asyncio.Task[None]]]:
    """Return the admitted requests, each with its turn of the loop after the first one."""
    entered: list[tuple[int, str]] = []
    turn = 0

    async def enter(tenant: str) -> None:
        await intake.turn(tenant)
        entered.append((turn, tenant))

    tasks = [asyncio.create_task(enter(tenant)) for tenant in tenants]
    for turn in range(1, TURNS * len(tenants) + 8):  # noqa: B007 - `enter` reads it
        await asyncio.sleep(0)
    return entered, tasks


@looped
async def test_whoever_comes_alone_does_not_wait() -> None:
    intake = RequestPacer()
    for _ in range(3):
        async with asyncio.timeout(1.0):
            await intake.turn("a")
        assert intake.waiting == 0
        await asyncio.sleep(0)


@looped
async def test_a_burst_at_once_then_one_in_a_few_turns() -> None:
    intake = RequestPacer()
    for _ in range(2):
        entered, _ = await _let_in(intake, ["a"] * (BURST + 6))
        turns = [turn for turn, _ in entered]
        assert turns[:BURST] == [1] * BURST
        assert {later - turn for turn, later in pairwise(turns[BURST:])} == {TURNS}
        assert len(turns) == BURST + 6
        entered, _ = await _let_in(intake, ["a"])
        assert entered[0][0] > 1, "it has just let in one that waited"
        await asyncio.sleep(2 * BURST * EACH_S)


@looped
async def test_tenants_take_turns() -> None:
    entered, _ = await _let_in(RequestPacer(), ["greedy"] * 20 + ["modest"])
    assert [tenant for _, tenant in entered].index("modest") <= BURST + 2


@looped
async def test_who_has_most_waiting_pays_for_a_full_intake() -> None:
    intake = RequestPacer(limit=3)
    entered, tasks = await _let_in(intake, ["greedy"] * (BURST + 4) + ["modest"])
    refused = [task.exception() for task in tasks if task.exception() is not None]
    assert [type(error) for error in refused] == [CapacityError, CapacityError]
    assert tasks[-1].exception() is None, "it had least"
    assert len(entered) == BURST + 3


@looped
async def test_who_leaves_waits_no_more() -> None:
    intake = RequestPacer()
    for _ in range(BURST - 1):
        await intake.turn("z")
    first, second, third = (asyncio.create_task(intake.turn(tenant)) for tenant in "abc")
    await asyncio.sleep(0)
    assert intake.waiting == 2
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.gather(first, third)
    await asyncio.sleep(0)
    assert intake.waiting == 0
