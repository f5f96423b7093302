"""Handles SIGINT, SIGTERM and SIGHUP for `clusterctl up`, from its first step until the process has ended."""

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

    Without a listener the first one is a KeyboardInterrupt, the second changes nothing, the third ends this process
    at once. The second must not stop the shutdown of the children, nor meet Python while it leaves.
    """

    def __init__(self) -> None:
        self._count = self._kept = 0
        self._is_keeping = False
        self._tell: Callable[[], object] | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def keep(self) -> None:
        """Keep signals for a later listener: an event loop is about to begin, and its start must not be interrupted."""
        self._is_keeping = True

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` in the running event loop for every signal, also those kept; later code is not interrupted.

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
        """Interrupt nothing any more: all that runs from now on ends by itself, and soon."""
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
