"""Thread of a rank that shows that its process runs, and logs the other threads' stacks when the host asks."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping

from tandem.core.clock import MonotonicClock
from tandem.core.logs import event_with_stacks
from tandem.workercore.heartbeat_page import Pulse

_log = logging.getLogger(__name__)
TICK_EVERY_S = 0.2
STACKS_SIGNAL = signal.SIGUSR1
"""Writes the stacks of a rank with threads that all wait for one that hangs: it runs no Python code."""


class Ticker:
    """Ticks beside long steps. `count_batch` gives numbers of the batch being computed; None = there is none yet."""

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
