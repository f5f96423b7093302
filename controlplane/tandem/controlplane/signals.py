"""What SIGINT, SIGTERM and SIGHUP do to `clusterctl up`, from its first step until the process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_KILLED = 130


class Signals:
    """Owns the three signals for the rest of the process; make it on the main thread.

    While nobody listens the first one is a KeyboardInterrupt, the second changes nothing, the third ends this process
    at once. The second must not stop what stops the children, nor meet Python while it leaves.
    """

    def __init__(self) -> None:
        self._count = self._kept = 0
        self._is_keeping = False
        self._tell: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def keep(self) -> None:
        """An event loop is about to begin, and must not be interrupted in that: keep signals for who listens there."""
        self._is_keeping = True

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Every signal calls `listener` in the running event loop, also those kept; what comes after that is not
        interrupted.

        Not the loop's own `add_signal_handler`: a signal that comes while the loop closes would do what it does to
        any Python program.
        """
        loop = asyncio.get_running_loop()
        self._tell = lambda: loop.call_soon_threadsafe(listener)
        for _ in range(self._kept):
            self._tell()
        try:
            yield
        finally:
            self.cease()

    def cease(self) -> None:
        """All that runs from now on ends by itself, and soon: nothing is interrupted any more."""
        self._count = max(self._count, 1)
        self._is_keeping, self._tell = False, None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._tell is not None:
            self._tell()
        elif self._is_keeping:
            self._kept += 1
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        self._count += 1
        if self._count == 1:
            raise KeyboardInterrupt
        if self._count > 2:
            os._exit(EXIT_KILLED)  # the kernel kills every child with us
