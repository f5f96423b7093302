"""Time, passed in so that policy, leases and state machines can run on virtual time."""

import time
from typing import Final, Protocol

_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """Monotonic seconds. The same boot of the same machine shares one origin, so processes on it can compare."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock: on Linux the one that runs on while the machine is suspended, as leases end
    meanwhile. Not to be compared with `time.monotonic`."""

    def now_s(self) -> float:
        return time.clock_gettime(_CLOCK)


class ManualClock:
    """A clock that moves only when it is set; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {seconds} s")
        self._now_s += seconds
