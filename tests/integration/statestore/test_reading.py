"""How a replica reads a worker's set and follows its stream, and what it counts."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from tandem.core.block_hash import HASH_BYTES
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index import replica as replica_module
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys

KEYS = Keys("test")


def test_what_is_counted_while_nothing_goes_wrong(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
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

    asyncio.run(scenario())


def test_a_large_set_is_read_in_parts(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "_CHUNK_BLOCKS", 7)

    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.parametrize("is_lost", [True, False], ids=["a block is lost", "a foreign block"])
def test_a_set_that_contradicts_its_stream_is_read_until_it_agrees(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any, is_lost: bool
) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
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

    asyncio.run(scenario())
