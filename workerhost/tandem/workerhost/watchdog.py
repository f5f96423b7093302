"""Watches the ranks of a worker that serves: a step that does not end takes it out of rotation, and then ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from tandem.core import metric_names as names
from tandem.core.config import WorkerSection
from tandem.core.errors import WorkerLostError
from tandem.core.logs import event
from tandem.workerhost.rank_group import START_AGAIN, RankGroup
from tandem.workerhost.rank_watch import WATCH_EVERY_S

_log = logging.getLogger(__name__)
WRITE_STACKS_S = 0.3
"""Time for a hanging rank to write its stacks, before it is killed."""


class Watchdog:
    """Belongs to the host's event loop. `stall` is called when the worker stalls, and when it goes on."""

    def __init__(self, ranks: RankGroup, settings: WorkerSection, stall: Callable[[bool], Awaitable[None]]) -> None:
        self._ranks, self._stall = ranks, stall
        self._limit_s = settings.step_watchdog_s
        self._slow_s = min(settings.step_slow_s, self._limit_s - 2 * WATCH_EVERY_S)  # stacks come before the end
        self._stalled_s = 0.0
        self._stalls = 0

    def counters(self) -> dict[str, float]:
        """Counters by the keys of a load report."""
        return {names.counter_key(names.STEP_STALLS): float(self._stalls)}

    async def run(self) -> NoReturn:
        """Raises WorkerLostError when a rank has stopped, or a step is past its limit: a stuck engine.

        The streams of this process would go on and hide it: ending them is how peers and routers learn of a stopped
        rank in time, a single one too.
        """
        watch = self._ranks.watch()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            silent = watch.look()
            slowest, in_step_s = watch.step_s()
            if silent:
                self._ranks.write_stacks(silent[0])
                await asyncio.sleep(WRITE_STACKS_S)
                raise WorkerLostError(f"rank {silent[0]} has stopped", why="it does not tick", todo=START_AGAIN)
            await self._judge(slowest, in_step_s)
            if in_step_s > self._limit_s:
                what = f"a step of rank {slowest} has been running for {in_step_s:.0f} s"
                raise WorkerLostError(what, todo=START_AGAIN)

    async def _judge(self, rank: int, in_step_s: float) -> None:
        if in_step_s >= self._slow_s:
            if not self._stalled_s:
                event(_log, "a step does not end", logging.WARNING, rank=rank, running_s=in_step_s)
                self._stalls += 1
                self._ranks.log_stacks()
                await self._stall(True)
            self._stalled_s = in_step_s
        elif self._stalled_s:
            event(_log, "the step has ended", logging.WARNING, rank=rank, took_s=self._stalled_s)
            self._stalled_s = 0.0
            await self._stall(False)
