"""Heartbeat of a rank: a page shared with its host, and the thread that ticks there.

The rank writes the time of its last tick, the number of steps begun and the step in progress. The host writes until
when the rank may push, publish and send, as which incarnation, and the number of its requests for stacks of threads.
Each field is one aligned 8-byte store, so a reader never sees half: through a view of words, as `struct` clears its
target first.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping

from tandem.core.clock import MonotonicClock
from tandem.core.logs import event_with_stacks

_log = logging.getLogger(__name__)
_TICK, _STEPS, _STEP, _LEASE, _INCARNATION, _STACKS = 0, 1, 2, 8, 9, 10
"""Indexes of words; those that the host writes are in a cache line of their own."""
PAGE_BYTES = 4096
TICK_EVERY_S = 0.2
STACKS_SIGNAL = signal.SIGUSR1
"""Writes the stacks of a rank with threads that all wait for one that hangs: it runs no Python code."""


class Pulse:
    """Both ends map the same memfd. All times are seconds of `MonotonicClock`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._numbers, self._seconds = memoryview(self._map).cast("Q"), memoryview(self._map).cast("d")

    @classmethod
    def create(cls, name: str) -> Pulse:
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(descriptor)

    def tick(self, now_s: float) -> None:
        """Mark the rank as alive (called by a thread that runs beside long steps)."""
        self._seconds[_TICK] = now_s

    def begin_step(self) -> None:
        step = self._numbers[_STEPS] + 1
        self._numbers[_STEPS] = step
        self._numbers[_STEP] = step

    def end_step(self) -> None:
        self._numbers[_STEP] = 0

    def grant(self, until_s: float, incarnation: int = 0) -> None:
        """Set the lease that the host holds: until then, as this incarnation."""
        self._numbers[_INCARNATION] = incarnation  # first: the new lease is never taken for the old one's
        self._seconds[_LEASE] = until_s

    def ask_stacks(self) -> None:
        """Request that the rank logs the stacks of its threads."""
        self._numbers[_STACKS] += 1

    def has_lease(self, now_s: float, incarnation: int) -> bool:
        """True if the rank may push, publish and send now as `incarnation`; before the first grant it may.

        A lease that the host got as another incarnation is not for what was begun before.
        """
        until_s = self.lease_until_s  # before the incarnation, which was written first
        is_mine = self.incarnation in (0, incarnation)
        return until_s == 0.0 or (is_mine and now_s < until_s)

    @property
    def ticked_s(self) -> float:
        return self._seconds[_TICK]

    @property
    def step(self) -> int:
        """The number, from 1, of the step in progress; 0 between steps."""
        return self._numbers[_STEP]

    @property
    def lease_until_s(self) -> float:
        return self._seconds[_LEASE]

    @property
    def incarnation(self) -> int:
        """The incarnation that has the lease; 0 before the first."""
        return self._numbers[_INCARNATION]

    @property
    def stacks_asked(self) -> int:
        """Number of the host's requests for stacks."""
        return self._numbers[_STACKS]

    def close(self) -> None:
        self._numbers.release()
        self._seconds.release()
        self._map.close()
        os.close(self.descriptor)


class Ticker:
    """Ticks beside long steps, on a thread that also logs the stacks of the others when the host asks.

    `count_batch` gives numbers of the batch being computed; None = there is none yet.
    """

    def __init__(self, pulse: Pulse) -> None:
        self.count_batch: Callable[[], Mapping[str, int]] | None = None
        self._pulse = pulse

    def start(self) -> None:
        """Start: the rank ticks from here on, and `STACKS_SIGNAL` writes to stderr."""
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        threading.Thread(target=self._run, name="tick", daemon=True).start()

    def _run(self) -> None:
        clock, pause, told = MonotonicClock(), threading.Event(), self._pulse.stacks_asked
        while True:
            self._pulse.tick(clock.now_s())
            if (asked := self._pulse.stacks_asked) != told:
                told = asked
                counts = self.count_batch() if self.count_batch is not None else {}
                stacks = _stacks(besides=threading.get_ident())
                event_with_stacks(
                    _log, "stacks of all threads", logging.WARNING, stacks, step=self._pulse.step, **counts
                )
            pause.wait(TICK_EVERY_S)


def _stacks(besides: int) -> str:
    """The position of every thread, but one. Code alone: no values, as these may be part of a prompt."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip()
        for ident, frame in sys._current_frames().items()
        if ident != besides
    )
