"""Exponentially decayed mean output length per model, used to price decode: it is not known of a single request.

Learnt from answers that have ended; the latest count most. One thread, no I/O.
"""

from __future__ import annotations

from typing import Final

ASSUMED_TOKENS: Final = 128
"""Assumed answer length before any has ended."""
_FIRST: Final = 8.0
"""Answers that this assumption counts as."""
_FADE: Final = 0.99
"""Weight of an answer, compared with the one after it."""


class AnswerLengths:
    """Decayed mean lengths."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def ended(self, model: str, tokens: float) -> None:
        """An answer of this model had so many tokens in the end."""
        count, total = self._seen.get(model, (0.0, 0.0))
        self._seen[model] = (count * _FADE + 1.0, total * _FADE + tokens)

    def mean(self, model: str) -> float:
        """Tokens of an answer."""
        count, total = self._seen.get(model, (0.0, 0.0))
        return (total + _FIRST * ASSUMED_TOKENS) / (count + _FIRST)
