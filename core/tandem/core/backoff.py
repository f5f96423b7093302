"""Delays before a dead member restarts: short at first, ever longer while it keeps dying."""

from __future__ import annotations

from tandem.core.clock import Clock

FIRST_S = 0.5
LAST_S = 10.0
RAN_WELL_S = 30.0


class RestartBackoff:
    """Delays of 0.5, 1, 2, 4, 8, 10, 10 … s; from the beginning again once the member ran well for 30 s."""

    def __init__(self, clock: Clock, *, first_s: float = FIRST_S) -> None:
        self._clock, self._first_s = clock, first_s
        self._next_s = first_s
        self._ready_since_s: float | None = None

    def ready(self) -> None:
        """The member runs from now on."""
        self._ready_since_s = self._clock.now_s()

    def died(self) -> float:
        """The member is gone; seconds to wait before it is started again."""
        if self._ready_since_s is not None and self._clock.now_s() - self._ready_since_s >= RAN_WELL_S:
            self._next_s = self._first_s
        self._ready_since_s = None
        delay_s, self._next_s = self._next_s, min(LAST_S, self._next_s * 2)
        return delay_s
