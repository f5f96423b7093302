"""Budgets in a real Redis: one script for all routers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tandem.core.config import BudgetSection
from tandem.core.errors import UnavailableError
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.budgets import BURST_S, BudgetStore, Charge

KEYS = Keys("test")
ONE = Charge(requests=1, tokens=10)
FLOOD_S = 3.0


async def time_s(redis: Any) -> float:
    """Return the time by the server's clock."""
    seconds, micros = await redis.time()
    return float(seconds) + float(micros) / 1e6


@pytest.mark.parametrize(
    ("budget", "per_s", "size"),
    [
        (BudgetSection(requests_per_minute=3000), 50.0, 1),
        (BudgetSection(tokens_per_minute=600_000), 10_000.0, 200),
    ],
)
def test_three_routers_together_spend_one_budget(
    server: PrivateRedis, client: Any, budget: BudgetSection, per_s: float, size: int
) -> None:
    """Within 5 %: what is granted is what the bucket held, and what came into it."""

    async def flood(redis: Any, until_s: float) -> int:
        """Spend until it is refused after that time: even if it asks slowly, all of the budget is spent then."""
        store, granted = BudgetStore(redis, KEYS), 0
        while True:
            wait_s = await store.spend("acme", budget, Charge(requests=1, tokens=size))
            granted += size if wait_s == 0 else 0
            if wait_s > 0 and await time_s(redis) >= until_s:
                return granted

    async def scenario() -> tuple[int, float]:
        async with AsyncExitStack() as stack:
            routers = [await stack.enter_async_context(client(server.url)) for _ in range(3)]
            began_s = await time_s(routers[0])
            granted = sum(await asyncio.gather(*(flood(redis, began_s + FLOOD_S) for redis in routers)))
            return granted, await time_s(routers[0]) - began_s

    granted, took_s = asyncio.run(scenario())
    fair = per_s * (BURST_S + took_s)
    assert 0.95 * fair <= granted <= 1.01 * fair + size


def test_a_burst_is_no_outage(server: PrivateRedis, client: Any) -> None:
    """Many more requests at once than there are connections: all of them are answered, and by the one bucket."""

    async def scenario() -> None:
        async with client(server.url) as redis:
            store, budget = BudgetStore(redis, KEYS), BudgetSection(requests_per_minute=60)
            waits = await asyncio.gather(*(store.spend("acme", budget, ONE) for _ in range(100)))
            assert waits.count(0) >= BURST_S
            assert max(waits) > 0

    asyncio.run(scenario())


def test_how_long_to_wait(server: PrivateRedis, client: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store, budget = BudgetStore(redis, KEYS), BudgetSection(requests_per_minute=6, tokens_per_minute=60)
            assert await store.spend("a", budget, Charge(requests=1, tokens=40)) == 0
            assert await store.spend("a", budget, ONE) == pytest.approx(31.0, abs=5.0)
            assert await store.spend("b", budget, ONE) == 0
            await store.spend("a", budget, Charge(requests=-1, tokens=-40, is_asked=False))
            assert await store.spend("a", budget, ONE) == 0
            await store.spend("a", budget, Charge(requests=0, tokens=100, is_asked=False))
            assert await store.spend("a", budget, ONE) > 60
            assert 0 < await redis.pttl(KEYS.budget("a")) < 300_000

    asyncio.run(scenario())


def test_without_redis(server: PrivateRedis, client: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store = BudgetStore(redis, KEYS)
            server.stop()
            with pytest.raises(UnavailableError):
                await store.spend("a", BudgetSection(requests_per_minute=1), ONE)

    asyncio.run(scenario())
