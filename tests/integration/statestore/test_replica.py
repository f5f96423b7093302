"""Test replicas against a real Redis: reading, lost events and convergence."""

import asyncio
import dataclasses
import itertools
import os
import random
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.core.block_hash import HASH_BYTES
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index import replica as replica_module
from tandem.statestore.index.events import BlockChange
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys
from tests.chaos.lossy_redis import LossyRedis

KEYS = Keys("test")


async def test_what_is_counted_while_nothing_goes_wrong(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", lease_s=60)
    replica = IndexReplica(redis, KEYS, check_s=0.02)
    empty_bytes = replica.memory_bytes
    await worker.register()
    worker.store(1, 2, 3)
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
        replica.set_workers({worker.id: worker.incarnation})
        async with running(replica.run()):
            await until(lambda: replica.positions == {worker.id: worker.publisher.position})
            for number in (4, 5):
                worker.store(number)
                await until(lambda: worker.publisher.is_idle)
                await until(lambda: replica.positions == {worker.id: worker.publisher.position})
    assert replica.holdings(worker.id) == worker.truth
    assert dataclasses.asdict(replica.counters) == {
        "gaps": 0, "mismatches": 0, "unreadable": 0, "reads": 1, "rereads": 0, "events": 2, "outages": 0,
    }  # fmt: skip
    assert replica.entries == 5
    assert replica.memory_bytes >= empty_bytes + 5 * HASH_BYTES
    assert replica.evicted == 0


async def test_a_large_set_is_read_in_parts(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "_CHUNK_BLOCKS", 7)
    async with client(server.url) as redis:
        worker = hosted_worker(redis, KEYS, "w1", lease_s=60)
        replica = IndexReplica(redis, KEYS)
        await worker.register()
        worker.store(*range(50))
        async with running(worker.publisher.run()):
            await until(lambda: worker.publisher.is_idle)
        replica.set_workers({worker.id: worker.incarnation})
        async with running(replica.run()):
            await until(lambda: replica.positions == {worker.id: worker.publisher.position})
        assert replica.holdings(worker.id) == worker.truth
        assert replica.counters.mismatches == 0


@pytest.mark.parametrize("is_lost", [True, False], ids=["a block is lost", "a foreign block"])
async def test_a_set_that_contradicts_its_stream_is_read_until_it_agrees(
    redis: Any, until: Any, running: Any, hosted_worker: Any, is_lost: bool
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", lease_s=60)
    replica = IndexReplica(redis, KEYS)
    await worker.register()
    worker.store(*range(5))
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    key = KEYS.blocks(worker.id, worker.incarnation)
    member = (await redis.srandmember(key)) if is_lost else b"\1" * 17
    await (redis.srem(key, member) if is_lost else redis.sadd(key, member))
    replica.set_workers({worker.id: worker.incarnation})
    async with running(replica.run()):
        await until(lambda: replica.counters.mismatches >= 2 and replica.counters.rereads >= 1)
        assert replica.holdings(worker.id) != worker.truth
        await (redis.sadd(key, member) if is_lost else redis.srem(key, member))
        await until(lambda: replica.positions == {worker.id: worker.publisher.position})
    assert replica.holdings(worker.id) == worker.truth
    assert replica.counters.rereads == replica.counters.reads - 1


NAMES = ("w1", "w2", "w3")


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_lost_events_are_made_up_for(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any, rate: float
) -> None:
    async def scenario(lossy: LossyRedis) -> None:
        keys, rng = Keys("test"), random.Random(7)
        url = server.url.replace(f":{server.port}/", f":{lossy.port}/")
        async with client(server.url) as direct, client(url) as redis:
            replica = IndexReplica(direct, keys, check_s=0.05)
            workers = [hosted_worker(redis, keys, name, entry_blocks=4) for name in NAMES]

            def registered(*_: object) -> None:
                replica.set_workers({worker.id: worker.incarnation for worker in workers})

            def has_converged() -> bool:
                return all(w.publisher.is_idle and replica.holdings(w.id) == w.truth for w in workers)

            beats = [worker.beat(registered) for worker in workers]
            async with running(replica.run(), *(w.publisher.run() for w in workers), *beats):
                await until(lambda: all(worker.is_registered for worker in workers))
                lossy.rate = rate
                for _ in range(150):
                    worker = rng.choice(workers)
                    numbers = tuple(rng.randrange(200) for _ in range(rng.randrange(1, 12)))
                    worker.change(rng.choice((BlockChange.STORED, BlockChange.STORED, BlockChange.REMOVED)), numbers)
                    await asyncio.sleep(0.003)
                lost, lossy.rate = lossy.lost, 1.0
                for number, worker in enumerate(workers):
                    worker.store(1000 + number)
                await until(lambda: lossy.lost >= lost + len(workers))
                lossy.rate = 0.0
                await until(has_converged)
                replica.check_integrity()
            assert sum(worker.publisher.counters.gaps for worker in workers) >= len(workers)

    with LossyRedis(server.port, random.Random(3)) as lossy:
        asyncio.run(scenario(lossy))


async def test_an_old_dump_of_a_living_worker_s_keys(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    """Set, stream and lease go back by some entries, all at once; what was published since is not lost."""
    keys = Keys("test")
    async with client(server.url) as redis:
        replica, worker = IndexReplica(redis, keys, check_s=0.05), hosted_worker(redis, keys, "w1")

        def registered(*_: object) -> None:
            replica.set_workers({worker.id: worker.incarnation})

        def has_converged() -> bool:
            return bool(worker.publisher.is_idle and replica.holdings(worker.id) == worker.truth)

        async with running(replica.run(), worker.publisher.run(), worker.beat(registered)):
            worker.store(*range(50))
            await until(lambda: worker.is_registered and has_converged())
            old = {key: (await redis.dump(key), await redis.pttl(key)) async for key in redis.scan_iter()}
            worker.change(BlockChange.REMOVED, tuple(range(20)))
            worker.store(*range(100, 140))
            await until(has_converged)
            before = worker.publisher.counters.gaps
            async with redis.pipeline(transaction=True) as pipeline:
                pipeline.flushall()
                for key, (payload, left_ms) in old.items():
                    pipeline.restore(key, max(0, left_ms), payload)
                await pipeline.execute()
            await until(lambda: worker.publisher.counters.gaps > before)
            await until(has_converged)
            worker.store(200)
            await until(has_converged)
            fresh = IndexReplica(redis, keys, check_s=0.05)
            fresh.set_workers({worker.id: worker.incarnation})
            async with running(fresh.run()):
                await until(lambda: fresh.holdings(worker.id) == worker.truth)


def test_a_lossy_redis_passes_everything_else_on(server: PrivateRedis) -> None:
    async def scenario(port: int) -> None:
        redis: Any = await connect(server.url.replace(f":{server.port}/", f":{port}/"))
        blob = bytes(range(256)) * 1000 + b"\r\n"
        assert await redis.set("key", blob)
        assert await redis.get("key") == blob
        async with redis.pipeline(transaction=False) as pipeline:
            pipeline.get("key").get("none").ping()
            assert await pipeline.execute() == [blob, None, True]
        await redis.aclose()

    with LossyRedis(server.port, random.Random(1)) as lossy:
        lossy.rate = 1.0
        asyncio.run(scenario(lossy.port))
    assert lossy.lost == 0


numbers = st.lists(st.integers(0, 40), max_size=12).map(tuple)
worker = st.sampled_from(NAMES)
actions = st.one_of(
    st.tuples(st.just("stored"), worker, numbers, st.integers(0, 1)),
    st.tuples(st.just("stored"), worker, numbers, st.integers(0, 1)),
    st.tuples(st.just("removed"), worker, numbers, st.integers(0, 1)),
    st.tuples(
        st.sampled_from(["cleared", "restarted", "lose set", "lose stream", "lose entry", "trim", "foreign", "turn"]),
        worker, st.just(()), st.just(0),
    ),
    st.tuples(st.sampled_from(["flush", "rebuild replica"]), worker, st.just(()), st.just(0)),
)  # fmt: skip
clusters = itertools.count()


class Scene:
    """Three hosted workers, a watcher and a replica under one cluster name."""

    def __init__(self, redis: Any, keys: Keys, hosted_worker: Any, group: asyncio.TaskGroup) -> None:
        self.redis, self.keys, self.group = redis, keys, group
        self.workers = {name: hosted_worker(redis, keys, name, entry_blocks=3, stream_entries=4) for name in NAMES}
        self.incarnations: dict[WorkerId, Incarnation] = {}
        self.tasks = [group.create_task(w.publisher.run()) for w in self.workers.values()]
        self.tasks += [group.create_task(w.beat(self.registered)) for w in self.workers.values()]
        self.rebuild()

    def rebuild(self) -> None:
        self.replica = IndexReplica(self.redis, self.keys, check_s=0.03)
        self.replica.set_workers(self.incarnations)
        self.tasks.append(self.group.create_task(self.replica.run()))

    def registered(self, name: WorkerId, incarnation: Incarnation) -> None:
        self.incarnations[name] = incarnation
        self.replica.set_workers(self.incarnations)

    async def act(self, action: str, name: str, blocks: tuple[int, ...], group: int) -> None:
        worker = self.workers[name]
        events, members = (f(worker.id, worker.incarnation) for f in (self.keys.events, self.keys.blocks))
        match action:
            case "stored" | "removed" | "cleared":
                worker.change(BlockChange(action), blocks, group)
            case "restarted":
                worker.is_registered = False
            case "lose set":
                await self.redis.delete(members)
            case "lose stream":
                await self.redis.delete(events)
            case "lose entry":
                for entry in await self.redis.xrevrange(events, count=1):
                    await self.redis.xdel(events, entry[0])
            case "trim":
                await self.redis.xtrim(events, maxlen=1, approximate=False)
            case "foreign":
                await self.redis.sadd(members, b"\1" * 17)
            case "flush":
                await self.redis.flushall()
            case "rebuild replica":
                self.tasks.pop().cancel()
                self.rebuild()
            case "turn":
                await self.redis.ping()

    def has_converged(self) -> bool:
        return all(
            w.is_registered
            and w.publisher.is_idle
            and self.incarnations.get(w.id) == w.incarnation
            and self.replica.holdings(w.id) == w.truth
            and self.replica.positions.get(w.id) == w.publisher.position
            for w in self.workers.values()
        )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(actions, max_size=30))
def test_the_replica_converges(
    server: PrivateRedis,
    client: Any,
    until: Any,
    hosted_worker: Any,
    steps: list[tuple[str, str, tuple[int, ...], int]],
) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis, asyncio.TaskGroup() as group:
            scene = Scene(redis, Keys(f"c{next(clusters)}"), hosted_worker, group)
            try:
                for step in steps:
                    await scene.act(*step)
                for number, worker in enumerate(scene.workers.values()):
                    worker.store(1000 + number)  # so that nothing is over before something new came through
                await until(scene.has_converged)
                scene.replica.check_integrity()
            finally:
                for task in scene.tasks:
                    task.cancel()

    asyncio.run(scenario())


async def test_a_killed_redis_comes_back(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    """kill -9, restart on the same data, then kill -9 and restart on none: no lease lapses, all readers converge."""
    keys = Keys("test")
    async with client(server.url) as redis:
        replica, watcher = IndexReplica(redis, keys, check_s=0.05), RegistryWatcher(redis, keys)
        workers = [hosted_worker(redis, keys, name) for name in NAMES]

        def follow(records: Any) -> None:
            replica.set_workers({name: record.incarnation for name, record in records.items()})

        def has_converged() -> bool:
            return all(w.publisher.is_idle and replica.holdings(w.id) == w.truth for w in workers)

        async with running(
            replica.run(), watcher.run(follow), *(w.publisher.run() for w in workers), *(w.beat() for w in workers)
        ):
            for number, w in enumerate(workers):
                w.store(*range(100 * number, 100 * number + 200))
            await until(has_converged)
            held = server
            for round_ in range(2):
                before = replica.lookup([])
                os.kill(held.pid, signal.SIGKILL)
                await until(lambda: replica.counters.outages > round_ and not held.is_alive())  # noqa: B023
                assert len(watcher.records) == 3
                assert replica.holdings(workers[0].id) == workers[0].truth
                assert before == {}
                workers[0].store(5000 + round_)
                workers[1].change(BlockChange.REMOVED, (100, 101))
                if round_ == 1:
                    (server.directory / "appendonly.aof").unlink(missing_ok=True)
                held = PrivateRedis.start(server.directory, "a secret", port=server.port)
                await until(has_converged)
                assert len(watcher.records) == 3
            replica.check_integrity()
        held.stop()
