"""Retry budget of a router: enough for the death of a full worker, too few to double a cluster's load."""

from __future__ import annotations

from tandem.core.clock import Clock


class RetryBudget:
    """A token bucket. Every request puts `per_request` in, every second `per_s`, at most `burst` are in it; a
    re-attempt takes one out. It starts full."""

    def __init__(self, burst: float, per_request: float, per_s: float, clock: Clock) -> None:
        self._burst, self._per_request, self._per_s, self._clock = burst, per_request, per_s, clock
        self._tokens, self._filled_s = burst, clock.now_s()

    @property
    def tokens(self) -> float:
        now_s = self._clock.now_s()
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        return self._tokens

    def deposit(self) -> None:
        """A request came in."""
        self._tokens = min(self._burst, self.tokens + self._per_request)

    def take(self) -> bool:
        """Pay for a re-attempt; False = there is nothing left."""
        if self.tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
