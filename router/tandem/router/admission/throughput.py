"""Drain rate of a queue: the cost that left it for the workers, over the time in which anything waited. Pure."""

from __future__ import annotations

import math

MEMORY_S = 5.0
"""Older measurements count ever less, and nothing after so long a time without a waiting request."""
KNOWN_AFTER_S, KNOWN_AFTER_SENT = 0.5, 8
"""Waiting and departures that have to be seen before the rate is believed: one small request that left a cluster that
has just started is no evidence for the next hundred."""
UNKNOWN_AT_MOST_S = MEMORY_S / 2
"""Waiting that is remembered, after which a queue that fewer have left is as slow as it seems."""


class DrainRate:
    """Cost that leaves a queue in a second."""

    def __init__(self) -> None:
        self._cost = self._time_s = self._sent = 0.0
        self._since_s: float | None = None
        self._idle_from_s = -math.inf

    def idle_s(self, now_s: float) -> float:
        """Return for how long no request has waited."""
        return 0.0 if self._since_s is not None else now_s - self._idle_from_s

    def watch(self, now_s: float, *, is_busy: bool) -> None:
        """From now on requests wait, or none does: then time passes uncounted."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            kept = math.exp(-passed_s / MEMORY_S)
            self._cost *= kept
            self._sent *= kept
            self._time_s = self._time_s * kept + MEMORY_S * (1 - kept)
        elif is_busy and self.idle_s(now_s) > MEMORY_S:
            self._cost = self._time_s = self._sent = 0.0
        if self._since_s is not None and not is_busy:
            self._idle_from_s = now_s
        self._since_s = now_s if is_busy else None

    def sent(self, cost: float) -> None:
        """A request left the queue, which cost so much."""
        self._cost += cost
        self._sent += 1.0

    @property
    def per_s(self) -> float | None:
        """None = not known yet."""
        is_known = self._time_s >= KNOWN_AFTER_S and self._sent >= KNOWN_AFTER_SENT
        return self._cost / self._time_s if self._cost > 0 and (is_known or self._time_s >= UNKNOWN_AT_MOST_S) else None
