"""Runs work on a second event loop, in its own thread, while the first one is blocked. The second loop knows how long
the first one has not turned. It proves that the process is alive; nothing else may run on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.lease_timing import BEAT_S, STAND_S
from tandem.core.logs import event

_log = logging.getLogger(__name__)
LATE_S = 2 * BEAT_S
"""A loop that has not turned for so long is blocked."""


class LoopWatch:
    """Measures for how long the loop that runs `run` has not turned. The properties may be read by any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._turned_s = self._clock.now_s()

    async def run(self) -> NoReturn:
        """Mark the turns of this loop; log how long each late one took."""
        while True:
            await asyncio.sleep(BEAT_S)
            stood_s = self._clock.now_s() - self._turned_s
            self._turned_s += stood_s
            if stood_s > LATE_S:
                event(_log, "the event loop stood", logging.WARNING, stood_s=round(stood_s, 2))

    @property
    def stands(self) -> bool:
        """True if a beat was due and could not be sent."""
        return self._clock.now_s() - self._turned_s > LATE_S

    @property
    def is_given_up(self) -> bool:
        """True if it has been blocked for so long that others, and so this process, must count it as gone."""
        return self._clock.now_s() - self._turned_s > STAND_S


async def run_beside(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run `work()` on an event loop of its own, in a thread `name`, until it ends; raises what it raises. If this call
    is cancelled the work is, too, and is waited for."""
    here = asyncio.get_running_loop()
    ended: asyncio.Future[None] = here.create_future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())

    def run() -> None:
        error: BaseException | None = None
        try:
            loop.run_until_complete(task)
        except BaseException as raised:  # noqa: BLE001 - raised where `run_beside` is awaited
            error = raised
        loop.close()
        here.call_soon_threadsafe(_settle, ended, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        if not ended.done():
            with contextlib.suppress(RuntimeError):  # it is closed: the work has just ended
                loop.call_soon_threadsafe(task.cancel)
            await asyncio.wait([ended])
        raise
    finally:
        if ended.done():
            thread.join()  # it has ended: `_settle` was its last call


def _settle(ended: asyncio.Future[None], error: BaseException | None) -> None:
    if error is None or isinstance(error, asyncio.CancelledError):
        ended.set_result(None)
    else:
        ended.set_exception(error)
