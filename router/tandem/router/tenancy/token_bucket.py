"""Token bucket of a budget: it fills at a rate, up to a few seconds' worth, and taking may leave a debt. Pure.

The same arithmetic as the script in `statestore/stores/budgets.py`, for as long as Redis is away.
"""

from __future__ import annotations

from tandem.core.config import BudgetSection
from tandem.statestore.stores.budgets import BURST_S, Charge


class LocalBucket:
    """One tenant's requests and tokens, as this router alone has seen them."""

    def __init__(self, budget: BudgetSection, now_s: float) -> None:
        self._per_s = (budget.requests_per_minute / 60, budget.tokens_per_minute / 60)
        self._left = [max(1.0, BURST_S * rate) for rate in self._per_s]
        self._now_s = now_s

    def spend(self, charge: Charge, now_s: float) -> float:
        """Take it, or return the seconds until there is enough; a negative charge gives back."""
        passed_s, self._now_s = max(0.0, now_s - self._now_s), max(now_s, self._now_s)
        for at, rate in enumerate(self._per_s):
            self._left[at] = min(max(1.0, BURST_S * rate), self._left[at] + passed_s * rate)
        wait_s = max(
            [(1 - left) / rate for left, rate in zip(self._left, self._per_s, strict=True) if rate and left < 1],
            default=0.0,
        )
        if wait_s > 0 and charge.is_asked:
            return wait_s
        self._left[0] -= charge.requests
        self._left[1] -= charge.tokens
        return 0.0
