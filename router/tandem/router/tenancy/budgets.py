"""Rate limits of tenants, in requests and in tokens a minute: charged before a request waits, settled when it ends.

The books are in Redis, so that all routers share them. While Redis is away each router keeps its own, and none refuses
a request that it would not refuse alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.config import BudgetSection
from tandem.core.errors import RateLimitError, UnavailableError
from tandem.statestore.stores.budgets import BURST_S, Charge

EVERYBODY = "*"
"""The budget of every tenant that has none of its own."""
SETTLE_S = 0.1
ANSWER_S = 0.25
"""Redis has this long to answer."""
AWAY_S = 1.0
"""Time without further requests to Redis after it did not answer."""


class BudgetBooks(Protocol):
    """As BudgetStore."""

    async def spend(self, tenant: str, budget: BudgetSection, charge: Charge) -> float: ...


class Budgets:
    """`on_refused` gets the reason of each refusal. `books` None = this router's own alone."""

    def __init__(
        self,
        budgets: Mapping[str, BudgetSection],
        books: BudgetBooks | None,
        clock: Clock,
        on_refused: Callable[[str], None],
    ) -> None:
        self._budgets, self._books, self._clock, self._on_refused = dict(budgets), books, clock, on_refused
        self._local: dict[str, LocalBucket] = {}
        self._due: dict[str, Charge] = {}
        self._has_due = asyncio.Event()
        self._away_until_s = float("-inf")

    async def spend(self, tenant: str, tokens: int) -> None:
        """One request of about `tokens`; RateLimitError with the time to come back if the tenant has spent all."""
        budget = self._of(tenant)
        if budget is None:
            return
        wait_s = await self._spend(tenant, budget, Charge(requests=1, tokens=tokens))
        if wait_s > 0:
            self._on_refused("budget")
            limits = []
            if budget.requests_per_minute:
                limits.append(f"{budget.requests_per_minute} requests")
            if budget.tokens_per_minute:
                limits.append(f"{budget.tokens_per_minute} tokens")
            raise RateLimitError(
                "the budget is spent", why=f"it is {' and '.join(limits)} a minute", todo="send it again later",
                retry_after_s=wait_s,
            )  # fmt: skip

    def settle(self, tenant: str, *, charged: int, used: int, is_served: bool) -> None:
        """A request that was charged has ended: it counts as what it `used`, or, not served, as nothing."""
        if self._of(tenant) is None:
            return
        charge = Charge(requests=-(not is_served), tokens=(used if is_served else 0) - charged, is_asked=False)
        local = self._local.get(tenant)
        if local is not None:  # it may have been charged here
            local.spend(charge, self._clock.now_s())
        if self._books is not None:
            self._owe(tenant, charge)

    async def run(self) -> None:
        """Settle in the background until cancelled. Charges that Redis did not take are kept for later; those that it
        perhaps took, as its answer did not come in time, are not sent again."""
        while True:
            await self._has_due.wait()
            await asyncio.sleep(SETTLE_S)
            await self.flush()

    async def flush(self) -> None:
        """Settle what is due now."""
        self._has_due.clear()
        due, self._due = self._due, {}
        for tenant, charge in due.items():
            budget = self._of(tenant)
            if budget is not None:
                with contextlib.suppress(TimeoutError):
                    try:
                        await self._ask(tenant, budget, charge)
                    except UnavailableError:
                        self._owe(tenant, charge)

    def _owe(self, tenant: str, charge: Charge) -> None:
        """Have it settled with what else is due."""
        before = self._due.get(tenant, Charge(requests=0, tokens=0))
        requests, tokens = before.requests + charge.requests, before.tokens + charge.tokens
        self._due[tenant] = Charge(requests=requests, tokens=tokens, is_asked=False)
        self._has_due.set()

    def _of(self, tenant: str) -> BudgetSection | None:
        budget = self._budgets.get(tenant, self._budgets.get(EVERYBODY))
        is_bounded = budget is not None and (budget.requests_per_minute or budget.tokens_per_minute)
        return budget if is_bounded else None

    async def _spend(self, tenant: str, budget: BudgetSection, charge: Charge) -> float:
        with contextlib.suppress(UnavailableError, TimeoutError):
            return await self._ask(tenant, budget, charge)
        now_s, local = self._clock.now_s(), self._local.get(tenant)
        if local is None:
            local = self._local[tenant] = LocalBucket(budget, now_s)
        return local.spend(charge, now_s)

    async def _ask(self, tenant: str, budget: BudgetSection, charge: Charge) -> float:
        """Redis's answer. UnavailableError: it is away; TimeoutError: it did not answer, and may have counted it."""
        now_s = self._clock.now_s()
        if self._books is None or now_s < self._away_until_s:
            raise UnavailableError("no books of budgets can be reached", todo="wait")
        try:
            async with asyncio.timeout(ANSWER_S):
                wait_s = await self._books.spend(tenant, budget, charge)
        except (UnavailableError, TimeoutError):
            self._away_until_s = now_s + AWAY_S
            raise
        self._local.pop(tenant, None)
        return wait_s


class LocalBucket:
    """Token bucket of a budget, as this router alone has seen it: it fills at a rate, up to a few seconds' worth, and
    taking may leave a debt. The same arithmetic as the script in `statestore/stores/budgets.py`, for as long as Redis
    is away."""

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
