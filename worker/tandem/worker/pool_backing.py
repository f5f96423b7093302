"""Takes the memory of KV pools once a rank is ready: the start does not wait for it, and no request finds it missing.

Until then a page takes memory when it is first written. Owns its thread; changes no byte of a pool.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from tandem.core.clock import MonotonicClock
from tandem.core.logs import event
from tandem.core.memory import HUGE_PAGE_BYTES
from tandem.kernels.cpu_memory import back

_log = logging.getLogger(__name__)
PIECE_BYTES = HUGE_PAGE_BYTES
"""Longest wait of this process's other threads, if they map memory meanwhile."""
IDLE_PAUSES = 3
"""Pause between two pieces, in multiples of a piece's own time: left to other processes of the machine."""
BUSY_PAUSE_S = 0.1
"""Pause between two pieces while a step computes, which otherwise has the core for itself."""


class PoolBacking:
    """Backs `pools` piece by piece. `count_batch` gives numbers of the step in progress; {} = there is none."""

    def __init__(self, pools: Sequence[memoryview], count_batch: Callable[[], Mapping[str, int]]) -> None:
        self._pools, self._count_batch, self._clock = tuple(pools), count_batch, MonotonicClock()

    def start(self) -> threading.Thread:
        """Run in the background, as a daemon, for as long as it takes."""
        thread = threading.Thread(target=self.run, name="pool-backing", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Run until all of it has memory. Most of the time is left to others, nearly all of it while a step
        computes."""
        began_s, pause = self._clock.now_s(), threading.Event()
        for pool in self._pools:
            address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
            for at in range(0, len(pool), PIECE_BYTES):
                piece_s = self._clock.now_s()
                try:
                    is_backed = back(address + at, min(PIECE_BYTES, len(pool) - at))
                except OSError as error:
                    event(_log, "KV memory is incomplete", logging.ERROR, why=error, todo="lower --kv-memory")
                    return
                if not is_backed:
                    event(_log, "KV memory is allocated on first use", logging.INFO, why="it needs Linux 5.14 or newer")
                    return
                pause.wait(BUSY_PAUSE_S if self._count_batch() else IDLE_PAUSES * (self._clock.now_s() - piece_s))
        size, took_s = sum(len(pool) for pool in self._pools), round(self._clock.now_s() - began_s, 3)
        event(_log, "KV memory is allocated", logging.INFO, bytes=size, took_s=took_s)
