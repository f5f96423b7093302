"""Leases and the watcher on a real server."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, RouterId, WorkerId, new_incarnation
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.member_lease import RouterLease
from tandem.statestore.index.registry import RegistryWatcher, WorkerLease, WorkerRecord
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import RouterRecord

KEYS = Keys("test")
LEASE_KEY = KEYS.lease(Member.WORKER, "w1")


def record(name: str = "w1", incarnation: Incarnation | None = None) -> WorkerRecord:
    return WorkerRecord(
        worker=WorkerId(name), incarnation=incarnation or new_incarnation(), role="prefill", address="h:1", model="m",
        fingerprint="f", num_blocks=(10, 20),
    )  # fmt: skip


async def is_missing(redis: Any) -> bool:
    return not await redis.exists(LEASE_KEY)


async def test_a_lease_is_taken_held_and_taken_over(redis: Any) -> None:
    first, second = WorkerLease(redis, KEYS), WorkerLease(redis, KEYS)
    await first.register(record())
    assert await first.beat(1, 2, 3)
    await second.register(record())
    assert not await first.beat(1, 2, 3)
    assert not await first.deregister()
    assert await second.beat(0, 0, 1 << 130)
    assert await second.deregister()
    assert not await second.beat(0, 0, 0)


async def test_what_comes_after_the_lease_is_refused_though_an_old_dump_put_the_lease_back(redis: Any) -> None:
    clock, left_s = MonotonicClock(), 2.5
    lease = WorkerLease(redis, KEYS, lease_s=60, clock=clock, held_until=lambda: clock.now_s() + left_s)
    old = record()
    await lease.register(old)
    assert await lease.beat(1, 1, 1)
    dump = await redis.dump(LEASE_KEY)
    left_s = -1.0
    await redis.delete(LEASE_KEY)
    await redis.restore(LEASE_KEY, 60_000, dump)
    before = await redis.hgetall(LEASE_KEY)
    for write in (lease.beat(2, 2, 2), lease.amend(replace(old, state="draining")), lease.register(old)):
        with pytest.raises(UnavailableError, match="too late"):
            await write
    assert await redis.hgetall(LEASE_KEY) == before
    assert (lease.counters.late, lease.counters.fenced) == (3, 0)
    await lease.register(record())
    left_s = 2.5
    assert await lease.beat(0, 0, 0), "the new incarnation lives"


async def test_a_server_whose_clock_was_put_forward_is_believed_at_the_next_beat(
    server: PrivateRedis, client: Any
) -> None:
    class Clock:
        behind_s = 0.0

        def now_s(self) -> float:
            return MonotonicClock().now_s() - self.behind_s

    async with client(server.url) as redis:
        clock = Clock()
        lease = WorkerLease(redis, KEYS, lease_s=60, clock=clock, held_until=lambda: clock.now_s() + 60)
        await lease.register(record())
        clock.behind_s = 3600.0
        with pytest.raises(UnavailableError, match="too late"):
            await lease.beat(1, 1, 1)
        assert await lease.beat(1, 1, 1)


async def test_a_lease_expires_on_the_server(redis: Any, until: Any) -> None:
    lease = WorkerLease(redis, KEYS, lease_s=0.2)
    await lease.register(record())
    await until(lambda: is_missing(redis))
    assert not await lease.beat(0, 0, 0)


async def test_every_key_of_a_member_expires(redis: Any) -> None:
    lease = WorkerLease(redis, KEYS)
    await lease.register(record())
    assert 0 < await redis.pttl(LEASE_KEY) <= 2500
    await lease.beat(0, 0, 0)
    assert 0 < await redis.pttl(LEASE_KEY) <= 2500
    await lease.deregister()
    assert 0 < await redis.pttl(LEASE_KEY) <= 10_000


async def test_a_beat_without_redis_says_so(redis: Any, server: PrivateRedis) -> None:
    lease = WorkerLease(redis, KEYS)
    await lease.register(record())
    server.stop()
    with pytest.raises(UnavailableError):
        await lease.beat(0, 0, 0)
    with pytest.raises(UnavailableError):
        await lease.register(record())
    with pytest.raises(UnavailableError):
        await lease.deregister()


async def test_the_watcher_sees_arrivals_departures_and_lapses(
    server: PrivateRedis, client: Any, until: Any, running: Any
) -> None:
    seen: list[dict[WorkerId, WorkerRecord]] = []
    async with client(server.url) as redis:
        watcher = RegistryWatcher(redis, KEYS, lease_s=2.0)
        assert watcher.is_stale
        one, two = WorkerLease(redis, KEYS, lease_s=1.5), WorkerLease(redis, KEYS)
        async with running(watcher.run(lambda records: seen.append(dict(records)), relist_s=0.1)):
            await until(lambda: seen == [{}])
            assert not watcher.is_stale
            first, second = record("w1"), record("w2")
            await one.register(first)
            await two.register(second)
            await until(lambda: watcher.records == {"w1": first, "w2": second})
            await until(lambda: set(watcher.records) == set())  # no worker beats
            await two.register(again := record("w2"))
            await until(lambda: watcher.records == {"w2": again})
            watcher.note_beat(WorkerId("w2"), again.incarnation)
            await two.deregister()
            await until(lambda: not watcher.records)
        assert seen[0] == {}
        assert seen[-1] == {}


async def test_a_departure_wakes_watchers_before_the_next_listing(redis: Any, until: Any, running: Any) -> None:
    lease, watcher = WorkerLease(redis, KEYS), RegistryWatcher(redis, KEYS)
    async with running(watcher.run(lambda _: None, relist_s=600)):
        await until(lambda: not watcher.is_stale)
        await lease.register(record())
        await until(lambda: bool(watcher.records))
        await lease.deregister()
        await until(lambda: not watcher.records)


async def test_an_outage_and_an_empty_redis_are_no_lapse(
    server: PrivateRedis, client: Any, until: Any, running: Any
) -> None:
    changes: list[Mapping[WorkerId, WorkerRecord]] = []
    async with client(server.url) as redis:
        lease, watcher = WorkerLease(redis, KEYS, lease_s=60), RegistryWatcher(redis, KEYS, lease_s=1.0)
        mine = record()
        await lease.register(mine)

        async def beat() -> None:
            while True:
                try:
                    if not await lease.beat(0, 0, 0):
                        await lease.register(mine)
                except UnavailableError:
                    pass
                await asyncio.sleep(0.05)

        async with running(watcher.run(changes.append, relist_s=0.05), beat()):
            await until(lambda: watcher.records == {"w1": mine})
            server.stop()
            await until(lambda: watcher.is_stale)
            assert watcher.records == {"w1": mine}
            with PrivateRedis.start(server.directory, "a secret", port=server.port):
                await until(lambda: not watcher.is_stale)
                await redis.flushall()
                await until(lambda: redis.exists(LEASE_KEY))
        assert len(changes) == 1


async def test_what_is_no_member_is_nobody(server: PrivateRedis, client: Any, until: Any, running: Any) -> None:
    def lease_of(name: str) -> str:
        return KEYS.lease(Member.WORKER, name)

    async with client(server.url) as redis:
        lease, watcher = WorkerLease(redis, KEYS, lease_s=60), RegistryWatcher(redis, KEYS, lease_s=60)
        await redis.sadd(KEYS.members(Member.WORKER), "no id", b"\xff", "", "x" * 200, "w2", "w3", "w4")
        await redis.hset(lease_of("w2"), mapping={"incarnation": "many", "beat": 1, "record": "{}"})
        await redis.hset(lease_of("w3"), mapping={"incarnation": 7, "beat": "never", "record": "{}"})
        await redis.hset(lease_of("w4"), mapping={"incarnation": 7, "beat": 1, "record": "[]"})
        async with running(watcher.run(lambda _: None, relist_s=0.05)):
            await until(lambda: not watcher.is_stale)
            await lease.register(mine := record())
            await until(lambda: watcher.records == {"w1": mine})
            await redis.hset(LEASE_KEY, "beat", "rubbish")  # and now this one
            await until(lambda: watcher._unreadable >= {"w1", "w2", "w3"})
            assert watcher.records == {"w1": mine}
            await lease.register(again := record())
            await lease.beat(0, 0, 0)
            await until(lambda: watcher.records == {"w1": again})


async def test_routers_hold_leases_by_the_same_rules(redis: Any) -> None:
    first, second = RouterLease(redis, KEYS, lease_s=60), RouterLease(redis, KEYS)
    mine = RouterRecord(router=RouterId("r1"), incarnation=new_incarnation(), admin_address="127.0.0.1:1")
    key = KEYS.lease(Member.ROUTER, "r1")
    await first.register(mine)
    assert await first.beat()
    assert RouterRecord.from_json(await redis.hget(key, "record")) == mine
    assert await redis.smembers(KEYS.members(Member.ROUTER)) == {b"r1"}
    assert await redis.pttl(key) > 0
    await redis.delete(key)  # as when it lapses
    assert not await first.beat()
    await second.register(replace(mine, incarnation=new_incarnation()))
    assert not await first.beat()
    assert await second.beat()
