"""Test API keys, budgets and the planner's records on a real Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.exceptions import RedisError

from tandem.core.api_keys import ApiKey, KeyWish, Scope, draw
from tandem.core.config import BudgetSection
from tandem.core.demand import Demand, DemandSample
from tandem.core.errors import UnavailableError
from tandem.core.ids import RouterId
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores import planning
from tandem.statestore.stores.api_keys import ApiKeyStore, from_json, to_json
from tandem.statestore.stores.budgets import BURST_S, BudgetStore, Charge
from tandem.statestore.stores.planning import MAX_WORD_BYTES, STALE_S, PlanningStore

KEYS = Keys("test")
TEXT, FIRST = draw(KeyWish(tenant="a", scopes=(Scope.INFER, Scope.ADMIN), slo="fast", name="é"), 1000)
_, SECOND = draw(KeyWish(tenant="b", lifetime_s=60, priority=7), 2000)


def test_a_record_is_read_back_equal() -> None:
    assert from_json(to_json(FIRST)) == FIRST
    assert from_json(to_json(SECOND).encode()) == SECOND


async def test_added_listed_revoked(redis: Any) -> None:
    store = ApiKeyStore(redis, KEYS)
    assert await store.all() == []
    await store.add(SECOND)
    await store.add(FIRST)
    await store.add(FIRST)  # again, as after a lost answer
    assert await store.all() == [FIRST, SECOND]
    everything = b"".join((await redis.hgetall(KEYS.api_keys)).values())
    assert TEXT.encode() not in everything
    assert TEXT[-20:].encode() not in everything  # of the secret
    assert await store.revoke(FIRST.id, 3000.0)
    assert not await store.revoke(FIRST.id, 3001.0)
    assert not await store.revoke("never", 3002.0)
    assert (await store.all(), await store.revoked()) == ([SECOND], [FIRST.id])
    assert await store.revoke(SECOND.id, 3003.0)
    assert await store.revoked() == [SECOND.id, FIRST.id]


async def test_a_revoked_key_whose_record_comes_back_opens_nothing(redis: Any) -> None:
    store = ApiKeyStore(redis, KEYS)
    await store.add(FIRST)
    assert await store.revoke(FIRST.id, 3000.0)
    await redis.hset(KEYS.api_keys, FIRST.id, to_json(FIRST))  # from a dump, or a replica that lagged
    assert await store.all() == []


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", "{}", to_json(FIRST).replace('"infer"', '"root"'),
     to_json(FIRST).replace('"slo":"fast"', '"slo":1'), to_json(FIRST).replace('"created_s":1000', '"created_s":"x"'),
     to_json(FIRST).replace(f'"id":"{FIRST.id}"', '"id":1'), to_json(FIRST).replace(FIRST.digest, "é")],
)  # fmt: skip
async def test_what_cannot_be_read_opens_nothing(redis: Any, text: str) -> None:
    store = ApiKeyStore(redis, KEYS)
    await store.add(SECOND)
    await redis.hset(KEYS.api_keys, FIRST.id, text)
    assert await store.all() == [SECOND]


async def test_watchers_hear_of_changes_at_once_and_keep_what_they_know_in_an_outage(
    redis: Any, server: PrivateRedis, until: Any, running: Any
) -> None:
    store, seen = ApiKeyStore(redis, KEYS), list[list[ApiKey]]()
    async with running(store.watch(seen.append, poll_s=600)):
        await until(lambda: seen and seen[-1] == [])
        await until(lambda: _subscribers(redis))
        await store.add(FIRST)
        await until(lambda: seen[-1] == [FIRST])
        server.stop()
        with pytest.raises(UnavailableError):
            await store.all()
        with pytest.raises(UnavailableError):
            await store.add(SECOND)
        with pytest.raises(UnavailableError):
            await store.revoke(FIRST.id, 3000.0)
        assert seen[-1] == [FIRST]
        with PrivateRedis.start(server.directory, "a secret", port=server.port):
            await until(lambda: _subscribers(redis))
            await store.add(SECOND)
            await until(lambda: seen[-1] == [FIRST, SECOND])
            await redis.delete(KEYS.api_keys)
            await store.revoke(FIRST.id, 3000.0)
            await until(lambda: seen[-1] == [])


async def test_polling_alone_is_enough(redis: Any, until: Any, running: Any) -> None:
    store, seen = ApiKeyStore(redis, KEYS), list[list[ApiKey]]()
    async with running(store.watch(seen.append, poll_s=0.02)):
        await until(lambda: seen and seen[-1] == [])
        await redis.hset(KEYS.api_keys, FIRST.id, to_json(FIRST))
        await until(lambda: seen[-1] == [FIRST])


async def _subscribers(redis: Any) -> bool:
    try:
        _, count = await redis.execute_command("PUBSUB", "NUMSUB", KEYS.api_keys_channel)
    except (RedisError, OSError):  # the server is starting
        return False
    return bool(count)


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


async def test_a_burst_is_no_outage(redis: Any) -> None:
    """Many more requests at once than there are connections: all of them are answered, and by the one bucket."""
    store, budget = BudgetStore(redis, KEYS), BudgetSection(requests_per_minute=60)
    waits = await asyncio.gather(*(store.spend("acme", budget, ONE) for _ in range(100)))
    assert waits.count(0) >= BURST_S
    assert max(waits) > 0


async def test_how_long_to_wait(redis: Any) -> None:
    store, budget = BudgetStore(redis, KEYS), BudgetSection(requests_per_minute=6, tokens_per_minute=60)
    assert await store.spend("a", budget, Charge(requests=1, tokens=40)) == 0
    assert await store.spend("a", budget, ONE) == pytest.approx(31.0, abs=5.0)
    assert await store.spend("b", budget, ONE) == 0
    await store.spend("a", budget, Charge(requests=-1, tokens=-40, is_asked=False))
    assert await store.spend("a", budget, ONE) == 0
    await store.spend("a", budget, Charge(requests=0, tokens=100, is_asked=False))
    assert await store.spend("a", budget, ONE) > 60
    assert 0 < await redis.pttl(KEYS.budget("a")) < 300_000


async def test_without_redis(redis: Any, server: PrivateRedis) -> None:
    store = BudgetStore(redis, KEYS)
    server.stop()
    with pytest.raises(UnavailableError):
        await store.spend("a", BudgetSection(requests_per_minute=1), ONE)


ROUTER_0, ROUTER_1 = RouterId("router-0"), RouterId("router-1")
DEMAND = Demand(asked=(DemandSample(age_s=1.0, prompt_tokens=10),))


def with_store(
    server: PrivateRedis, client: Any, scenario: Callable[[Any, PlanningStore], Awaitable[None]]
) -> None:  # fmt: skip
    async def run() -> None:
        async with client(server.url) as redis:
            await scenario(redis, PlanningStore(redis, KEYS))

    asyncio.run(run())


def test_every_router_has_one_word_the_last(server: PrivateRedis, client: Any) -> None:
    async def scenario(redis: Any, store: PlanningStore) -> None:
        assert await store.heard() == []
        assert await store.tell(ROUTER_1, DEMAND)
        assert await store.tell(ROUTER_0, DEMAND)
        assert await store.tell(ROUTER_0, Demand())
        found = await store.heard()
        assert [(one.router, one.demand) for one in found] == [(ROUTER_0, Demand()), (ROUTER_1, DEMAND)]
        assert all(0 <= one.age_s < STALE_S for one in found)
        assert 0 < await redis.ttl(KEYS.demand) <= planning.EXPIRE_S

    with_store(server, client, scenario)


def test_what_is_old_or_unreadable_is_forgotten(server: PrivateRedis, client: Any) -> None:
    async def scenario(redis: Any, store: PlanningStore) -> None:
        seconds, micros = await redis.time()
        old = f"{seconds * 1_000_000 + micros - int((STALE_S + 1) * 1e6)} {DEMAND.to_json()}"
        await store.tell(ROUTER_0, DEMAND)
        await redis.hset(KEYS.demand, mapping={"gone": old, "odd": f"{seconds}000000 {{}}", "worse": b"\xff\xfe"})
        assert [one.router for one in await store.heard()] == [ROUTER_0]
        assert await redis.hkeys(KEYS.demand) == [ROUTER_0.encode()]

    with_store(server, client, scenario)


def test_a_row_that_was_written_again_meanwhile_stays(server: PrivateRedis, client: Any) -> None:
    """Between the look at an old row and its removal."""

    async def scenario(redis: Any, store: PlanningStore) -> None:
        forget = store._forget

        async def late(**arguments: Any) -> None:
            await store.tell(ROUTER_0, DEMAND)
            await forget(**arguments)

        store._forget = late
        await redis.hset(KEYS.demand, mapping={str(ROUTER_0): "1 {}", "gone": "1 {}"})
        assert await store.heard() == []
        assert [one.router for one in await store.heard()] == [ROUTER_0]
        assert await redis.hkeys(KEYS.demand) == [ROUTER_0.encode()]

    with_store(server, client, scenario)


def test_no_more_routers_than_the_bound(server: PrivateRedis, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_ROUTERS", 1)

    async def scenario(redis: Any, store: PlanningStore) -> None:
        assert await store.tell(ROUTER_0, DEMAND)
        assert not await store.tell(ROUTER_1, DEMAND)
        assert await store.tell(ROUTER_0, Demand())
        assert [one.router for one in await store.heard()] == [ROUTER_0]

    with_store(server, client, scenario)


def test_the_planners_word_holds_for_a_while(server: PrivateRedis, client: Any, until: Any) -> None:
    async def scenario(redis: Any, store: PlanningStore) -> None:
        assert await store.word() is None
        await store.say({"mode": "act", "reason": "so"}, for_s=60.0)
        assert await store.word() == {"mode": "act", "reason": "so"}
        await store.say({"mode": "act"}, for_s=0.001)
        await until(lambda: _is_silent(store))
        for text in (b"[]", b"{", b"\xff", b'"' + b"x" * MAX_WORD_BYTES + b'"'):
            await redis.set(KEYS.planner, text)
            assert await store.word() is None, text[:9]

    with_store(server, client, scenario)


async def _is_silent(store: PlanningStore) -> bool:
    return await store.word() is None


def test_an_outage_is_said(server: PrivateRedis, client: Any) -> None:
    async def scenario(redis: Any, store: PlanningStore) -> None:
        server.stop()
        for call in (store.tell(ROUTER_0, DEMAND), store.heard(), store.say({}, for_s=1.0), store.word()):
            with pytest.raises(UnavailableError):
                await call

    with_store(server, client, scenario)
