"""After any faults of workers, Redis and the stream, the replica converges to the blocks that the workers hold."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys

NAMES = ("w1", "w2", "w3")
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


def test_a_killed_redis_comes_back(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    """kill -9, restart on the same data, then kill -9 and restart on none: no lease lapses, all readers converge."""

    async def scenario() -> None:
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

    asyncio.run(scenario())
