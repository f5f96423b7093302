"""Notices clients that leave before there is an answer to send: while their prompt is tokenised, for example."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from tandem.core.errors import CancelledError


@contextmanager
def present(request: Request) -> Iterator[None]:
    """End the code inside with CancelledError as soon as the client closes the connection.

    The request's body must have been read: whatever else arrives is not kept.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_gone = False
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            continue
        is_gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    beginning = loop.call_soon(begin)  # most works never wait, and need no watcher
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise CancelledError("the client closed the connection") from None
        raise  # ended by another caller
    finally:
        beginning.cancel()
        if watcher is not None:
            watcher.cancel()
