"""The planner's input and output on a real server: every router's last report while it is young, and the planner's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tandem.core.demand import Demand, DemandSample
from tandem.core.errors import UnavailableError
from tandem.core.ids import RouterId
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores import planning
from tandem.statestore.stores.planning import MAX_WORD_BYTES, STALE_S, PlanningStore

KEYS = Keys("test")
ONE, TWO = RouterId("router-0"), RouterId("router-1")
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
        assert await store.tell(TWO, DEMAND)
        assert await store.tell(ONE, DEMAND)
        assert await store.tell(ONE, Demand())
        found = await store.heard()
        assert [(one.router, one.demand) for one in found] == [(ONE, Demand()), (TWO, DEMAND)]
        assert all(0 <= one.age_s < STALE_S for one in found)
        assert 0 < await redis.ttl(KEYS.demand) <= planning.EXPIRE_S

    with_store(server, client, scenario)


def test_what_is_old_or_unreadable_is_forgotten(server: PrivateRedis, client: Any) -> None:
    async def scenario(redis: Any, store: PlanningStore) -> None:
        seconds, micros = await redis.time()
        old = f"{seconds * 1_000_000 + micros - int((STALE_S + 1) * 1e6)} {DEMAND.to_json()}"
        await store.tell(ONE, DEMAND)
        await redis.hset(KEYS.demand, mapping={"gone": old, "odd": f"{seconds}000000 {{}}", "worse": b"\xff\xfe"})
        assert [one.router for one in await store.heard()] == [ONE]
        assert await redis.hkeys(KEYS.demand) == [ONE.encode()]

    with_store(server, client, scenario)


def test_a_row_that_was_written_again_meanwhile_stays(server: PrivateRedis, client: Any) -> None:
    """Between the look at an old row and its removal."""

    async def scenario(redis: Any, store: PlanningStore) -> None:
        forget = store._forget

        async def late(**arguments: Any) -> None:
            await store.tell(ONE, DEMAND)
            await forget(**arguments)

        store._forget = late
        await redis.hset(KEYS.demand, mapping={str(ONE): "1 {}", "gone": "1 {}"})
        assert await store.heard() == []
        assert [one.router for one in await store.heard()] == [ONE]
        assert await redis.hkeys(KEYS.demand) == [ONE.encode()]

    with_store(server, client, scenario)


def test_no_more_routers_than_the_bound(server: PrivateRedis, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_ROUTERS", 1)

    async def scenario(redis: Any, store: PlanningStore) -> None:
        assert await store.tell(ONE, DEMAND)
        assert not await store.tell(TWO, DEMAND)
        assert await store.tell(ONE, Demand())
        assert [one.router for one in await store.heard()] == [ONE]

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
        for call in (store.tell(ONE, DEMAND), store.heard(), store.say({}, for_s=1.0), store.word()):
            with pytest.raises(UnavailableError):
                await call

    with_store(server, client, scenario)
