"""Limits the number of values of a metric's label that come and go, such as a worker's name."""

from __future__ import annotations

from typing import Final

MAX_VALUES: Final = 32
"""Limit for a worker's peers: each has counters in every load report."""
OTHER: Final = "other"


class BoundedLabel:
    """The first `limit` values stand for themselves, all further ones are "other"."""

    def __init__(self, limit: int = MAX_VALUES) -> None:
        self._limit = limit
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """Return the label's value for this value."""
        if value in self._values:
            return value
        if len(self._values) >= self._limit:
            return OTHER
        self._values.add(value)
        return value
