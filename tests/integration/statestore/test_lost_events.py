"""Events that Redis never got, though the worker believes so: the replica still ends at what the worker holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys
from tests.chaos.lossy_redis import LossyRedis

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


def test_an_old_dump_of_a_living_worker_s_keys(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    """Set, stream and lease go back by some entries, all at once; what was published since is not lost."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


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
