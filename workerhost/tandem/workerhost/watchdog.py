"""Watches a worker's ranks: one that does not tick ends it; a step that does not end takes it out of rotation first.

Ticks, and how long steps run, are counted in the host's own looks at the ranks' pulses. No clock: a machine that was
suspended, host and ranks together, costs one look and is no false alarm, also in the middle of a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from tandem.core import metric_names as names
from tandem.core.config import WorkerSection
from tandem.core.errors import WorkerLostError
from tandem.core.logs import event
from tandem.core.timeout_scale import patient
from tandem.workercore.heartbeat import Pulse
from tandem.workerhost.rank_group import START_AGAIN, RankGroup

_log = logging.getLogger(__name__)
WRITE_STACKS_S = 0.3
"""Time for a hanging rank to write its stacks, before it is killed."""
WATCH_EVERY_S = 0.25
SILENT_LOOKS = int(patient(10))
"""So many looks in a row without a new tick (ranks tick every 0.2 s) mean that the rank has stopped: 2.5 to 2.75 s."""
LOADING_LOOKS = int(patient(480))
"""While it loads: 2 minutes. Imports from a cold disk block every thread of the process, the ticking one too."""


class RankWatch:
    """Call `look` every WATCH_EVERY_S."""

    def __init__(self, pulses: Sequence[Pulse], silent_looks: int = SILENT_LOOKS) -> None:
        self._pulses, self._silent_looks = tuple(pulses), silent_looks
        self._ticked_s = [pulse.ticked_s for pulse in pulses]
        self._silent = [0] * len(self._pulses)
        self._step = [pulse.step for pulse in pulses]
        self._stepping = [0] * len(self._pulses)

    def look(self) -> list[int]:
        """Return the ranks that have not ticked for `silent_looks` looks."""
        for rank, pulse in enumerate(self._pulses):
            ticked_s, step = pulse.ticked_s, pulse.step
            self._silent[rank] = self._silent[rank] + 1 if ticked_s == self._ticked_s[rank] else 0
            self._stepping[rank] = self._stepping[rank] + 1 if step and step == self._step[rank] else 0
            self._ticked_s[rank], self._step[rank] = ticked_s, step
        return [rank for rank, looks in enumerate(self._silent) if looks >= self._silent_looks]

    def step_s(self) -> tuple[int, float]:
        """The rank that has been in the same step for most looks, and their duration (0: another step, or none, at the
        latest look)."""
        rank = max(range(len(self._stepping)), key=self._stepping.__getitem__)
        return rank, self._stepping[rank] * WATCH_EVERY_S


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
        watch = RankWatch(self._ranks.pulses)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            silent = watch.look()
            slowest, in_step_s = watch.step_s()
            if silent:
                self._ranks.write_stacks(silent[0])
                await asyncio.sleep(WRITE_STACKS_S)
                raise WorkerLostError(f"rank {silent[0]} has stopped", why="it sends no heartbeat", todo=START_AGAIN)
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
