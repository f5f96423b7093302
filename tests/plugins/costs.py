"""The cost of an action to a process: the longest turn of its event loop, and the growth of its memory.

with measured(loop) as cost:
    ...  # whatever is to be measured, in this thread or another
assert cost.longest_turn_s < LONGEST_TURN_S
"""

import asyncio
import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LONGEST_TURN_S = 0.2
"""No client may have the loop of a router stand for longer."""
MOST_BYTES = 50 << 20
MOST_TIMES_ITS_BYTES = 20
"""Memory limit of a refused request: at most MOST_BYTES, and so many times its own bytes."""
LEAST_BYTES = 8 << 20
"""So much the memory of a process grows by itself: pages are taken by the arena, buffers of sockets come and go."""
_BEAT_S = 0.001


@dataclass(slots=True)
class Cost:
    """`longest_turn_s` is CPU time of the whole process between two beats of the loop: threads that hold the
    interpreter count, other processes on a busy machine do not. `grown_bytes` is from the resident memory before to
    the peak since."""

    longest_turn_s: float = 0.0
    grown_bytes: int = 0

    def check_turn(self) -> None:
        """AssertionError if the loop stood for longer than it may."""
        assert self.longest_turn_s <= LONGEST_TURN_S, f"the loop stood for {self.longest_turn_s:.3f} s"

    def check_refusal(self, sent_bytes: int, most_bytes: int = MOST_BYTES) -> None:
        """AssertionError if a refused request of so many bytes cost more than one may."""
        self.check_turn()
        most = max(LEAST_BYTES, min(most_bytes, MOST_TIMES_ITS_BYTES * sent_bytes))
        assert self.grown_bytes <= most, f"{self.grown_bytes / 2**20:.1f} MiB for {sent_bytes / 2**20:.1f} MiB"


@contextmanager
def measured(loop: asyncio.AbstractEventLoop) -> Iterator[Cost]:
    """The cost of what runs in the context; `loop` runs in this thread or in another one."""
    cost, beats = Cost(), _Beats(loop)
    gc.collect()
    gc.freeze()  # what the tests before hold is not this one's to walk
    with suppress(AttributeError, OSError):  # another libc has nothing to give back
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    before = _status_bytes("VmRSS")
    beats.start_clock()
    loop.call_soon_threadsafe(beats.begin)
    try:
        yield cost
    finally:
        cost.longest_turn_s = beats.longest_by_now_s()
        loop.call_soon_threadsafe(beats.end)
        cost.grown_bytes = max(0, _status_bytes("VmHWM") - before)


class _Beats:
    """Looks at the clock every millisecond, or as soon as the loop comes to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0
        self._longest_s = 0.0

    def start_clock(self) -> None:
        """Count from here: the first turn may be over before the loop comes to `begin`."""
        self._last_s = time.process_time()

    def begin(self) -> None:
        self._beat()

    def longest_by_now_s(self) -> float:
        """The longest turn, that of now among them: the loop may not have come to a beat since."""
        return max(self._longest_s, time.process_time() - self._last_s)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        now_s = time.process_time()
        self._longest_s = max(self._longest_s, now_s - self._last_s)
        self._last_s = now_s
        self._timer = self._loop.call_later(_BEAT_S, self._beat)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
