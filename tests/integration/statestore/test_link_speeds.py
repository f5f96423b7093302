"""Measured links on a real server: written by one, read by all, with an age; they expire, and outages are survived."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.link_speed import LinkSpeed
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores import link_speeds
from tandem.statestore.stores.link_speeds import EXPIRE_S, LinkSpeedStore

KEYS = Keys("test")
TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1.5e9, latency_s=1e-4, age_s=12.0)
REFUSED = LinkSpeed(from_host="a", to_host="b", transport="shm", peer="d0", failure="refused | by d0")


def without_age(rows: list[LinkSpeed]) -> set[LinkSpeed]:
    return {replace(row, age_s=0.0) for row in rows}


async def test_what_one_writes_another_reads_with_its_age(redis: Any) -> None:
    store = LinkSpeedStore(redis, KEYS)
    assert await store.read() == []
    await store.write([TCP, REFUSED])
    rows = await LinkSpeedStore(redis, KEYS).read()
    assert without_age(rows) == without_age([TCP, REFUSED])
    (tcp,) = [row for row in rows if not row.failure]
    assert 12.0 <= tcp.age_s < 72.0
    assert 0 < await redis.ttl(KEYS.link_speeds) <= EXPIRE_S


async def test_a_pair_of_hosts_has_one_row_a_transport_and_failures_are_a_worker_s(redis: Any) -> None:
    store = LinkSpeedStore(redis, KEYS)
    newer = replace(TCP, peer="d1", bytes_per_s=2e9, age_s=0.0)
    await store.write([TCP, REFUSED, replace(REFUSED, peer="d1")])
    await store.write([newer, replace(REFUSED, failure="", bytes_per_s=5e9)])  # shm to d0 works now
    rows = await store.read()
    works = replace(REFUSED, failure="", bytes_per_s=5e9)
    assert without_age(rows) == without_age([newer, works, replace(REFUSED, peer="d1")])


async def test_old_and_unreadable_rows_are_left_out_and_removed(redis: Any) -> None:
    store = LinkSpeedStore(redis, KEYS)
    await store.write([replace(TCP, age_s=EXPIRE_S + 5.0), REFUSED])
    for value in ("", "x y", "12 [1,2]", '12 {"a":1}', "12", b"\xff\xfe"):
        await redis.hset(KEYS.link_speeds, f"junk {value!r}", value)
    assert without_age(await store.read()) == without_age([REFUSED])
    assert await redis.hlen(KEYS.link_speeds) == 1


# In the order of a row: from, to, transport, peer, bytes a second, latency in seconds, failure.
@pytest.mark.parametrize(
    "row",
    [
        '["a","b","tcp","d0",NaN,1e-4,""]',
        '["a","b","tcp","d0",Infinity,1e-4,""]',
        '["a","b","tcp","d0",-Infinity,1e-4,""]',
        '["a","b","tcp","d0",1e400,1e-4,""]',
        '["a","b","tcp","d0",1e300,1e-4,""]',
        f'["a","b","tcp","d0",1{"0" * 400},1e-4,""]',
        '["a","b","tcp","d0",0,1e-4,""]',
        '["a","b","tcp","d0",-1.5,1e-4,""]',
        '["a","b","tcp","d0","1e9",1e-4,""]',
        '["a","b","tcp","d0",true,1e-4,""]',
        '["a","b","tcp","d0",1e9,NaN,""]',
        '["a","b","tcp","d0",1e9,Infinity,""]',
        '["a","b","tcp","d0",1e9,-1,""]',
        '["a","b","tcp","d0",1e9,1e9,""]',
        '["a","b","tcp","d0",NaN,0,"refused"]',
        '["a",["b"],"tcp","d0",1e9,1e-4,""]',
        "[" * 100_000,
    ],
)
async def test_a_row_that_no_measurement_can_say_is_left_out_and_removed(redis: Any, row: str) -> None:
    store = LinkSpeedStore(redis, KEYS)
    await store.write([TCP, REFUSED])
    now_s, _ = await redis.time()
    await redis.hset(KEYS.link_speeds, "planted", f"{now_s * 1_000_000} {row}")
    assert without_age(await store.read()) == without_age([TCP, REFUSED])
    assert not await redis.hexists(KEYS.link_speeds, "planted")


@pytest.mark.parametrize("ahead_s", [3600, 10**400], ids=["an hour", "beyond any number"])
async def test_a_row_of_the_future_is_left_out_and_does_not_stay_young_for_ever(redis: Any, ahead_s: int) -> None:
    store = LinkSpeedStore(redis, KEYS)
    now_s, _ = await redis.time()
    row = f'{(now_s + ahead_s) * 1_000_000} ["a","b","tcp","d0",1e9,1e-4,""]'
    await redis.hset(KEYS.link_speeds, "planted", row)
    assert await store.read() == []
    assert not await redis.hexists(KEYS.link_speeds, "planted")


async def test_the_hash_is_bounded(server: PrivateRedis, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speeds, "MAX_ROWS", 5)
    async with client(server.url) as redis:
        store = LinkSpeedStore(redis, KEYS)
        await store.write([replace(TCP, to_host=f"h{n}") for n in range(9)])
        await store.write([replace(TCP, to_host="h0", bytes_per_s=9e9)])  # what is there can be renewed
        rows = await store.read()
        assert len(rows) == 5
        assert next(row for row in rows if row.to_host == "h0").bytes_per_s == 9e9


def test_watchers_hear_at_once(server: PrivateRedis, client: Any, until: Any, running: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store, seen = LinkSpeedStore(redis, KEYS), list[list[LinkSpeed]]()
            async with running(store.watch(seen.append, poll_s=600)):
                await until(lambda: seen)
                await until(lambda: _is_heard(redis))
                await store.write([TCP])
                await until(lambda: without_age(seen[-1]) == without_age([TCP]))

    async def _is_heard(redis: Any) -> bool:
        answer = await redis.execute_command("PUBSUB", "NUMSUB", KEYS.link_speeds_channel)
        return int(answer[1]) > 0

    asyncio.run(scenario())
