"""Time, passed in so that policy, leases and state machines can run on virtual time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. The same boot of the same machine shares one origin, so processes on it can compare."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests and simulation."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {seconds} s")
        self._now_s += seconds
