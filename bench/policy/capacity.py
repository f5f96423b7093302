"""Finds how much faster a trace may arrive until a cluster no longer keeps up with it."""

from __future__ import annotations

from collections.abc import Callable

MAX_WAITING = 0.01
"""A rate is sustained if at most this share of all requests has no first token when the last one arrives."""
_MAX_FACTOR = 1e4
_STEP = 1.25
"""Factor between the first guesses: far above the sustained rate, a run takes long."""


def highest_factor(
    waiting_share: Callable[[float], float], *, start: float = 1.0, precision: float = 0.01, limit: float = MAX_WAITING
) -> float:
    """Return the highest time-scaling of a trace's arrivals that is sustained, within `precision` of itself.

    `waiting_share(factor)` plays the trace `factor` times as fast and gives `Outcome.waiting` as a share, which is
    taken to grow with the factor. Goes up or down in growing steps, then bisects. Raises ValueError if nothing down to
    1/10,000 is sustained.
    """
    low = high = start
    step = _STEP
    if waiting_share(start) <= limit:
        while low < _MAX_FACTOR and waiting_share(high := low * step) <= limit:
            low, step = high, step * _STEP
    else:
        while waiting_share(low := high / step) > limit:
            high, step = low, step * _STEP
            if low < 1 / _MAX_FACTOR:
                raise ValueError(f"not even {low:g} times the trace's rate is sustained")
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if waiting_share(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
