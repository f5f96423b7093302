"""Events a second: how fast workers can publish through a real Redis, and how fast a replica follows them.

One process plays all workers, and after them the router. The replica stands at the beginning of every stream when the
clock starts, and has to apply all of it; small entries are single engine steps, large ones a cache that fills.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from bench.report import Row
from tandem.core.block_hash import BlockHash
from tandem.core.ids import WorkerId, new_incarnation
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.index.registry import WorkerLease
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord
from tools.waiting import wait_for_async

PATIENCE_S = 600.0
"""Timeout of each part; it measures nothing."""
CASES = ((4, 20_000), (64, 400_000), (512, 800_000))
"""Blocks of an entry, and of all entries."""
LEASE_S = 600.0


def run(workers: int) -> list[Row]:
    rows: list[Row] = []
    for entry_blocks, blocks in CASES:
        with tempfile.TemporaryDirectory(prefix="td-") as folder, PrivateRedis.start(Path(folder), "bench") as server:
            rows += asyncio.run(_case(server.url, workers, entry_blocks, blocks))
    return rows


async def _case(url: str, workers: int, entry_blocks: int, blocks: int) -> list[Row]:
    redis, keys = await connect(url), Keys("bench")
    replica = IndexReplica(redis, keys)
    publishers: list[BlockEventPublisher] = []
    incarnations = {}
    for number in range(workers):
        worker, incarnation = WorkerId(f"w{number}"), new_incarnation()
        record = WorkerRecord(
            worker=worker, incarnation=incarnation, role="prefill", address="", model="m", fingerprint="f"
        )
        await WorkerLease(redis, keys, lease_s=LEASE_S).register(record)
        incarnations[worker] = incarnation
        publishers.append(
            BlockEventPublisher(
                redis,
                keys,
                worker,
                incarnation,
                entry_blocks=entry_blocks,
                stream_entries=blocks,
                max_pending_blocks=blocks,
                check_s=LEASE_S,
            )
        )
    async with asyncio.TaskGroup() as group:
        writing = [group.create_task(publisher.run()) for publisher in publishers]
        await wait_for_async(lambda: all(publisher.is_idle for publisher in publishers), PATIENCE_S)
        replica.set_workers(incarnations)
        reading = group.create_task(replica.run())
        await wait_for_async(lambda: len(replica.positions) == workers, PATIENCE_S)
        reading.cancel()
        begin_s = time.perf_counter()
        for publisher in publishers:
            hashes = (BlockHash(os.urandom(16)) for _ in range(blocks // workers))
            publisher.offer([BlockEvent(BlockChange.STORED, tuple(hashes))])
        await wait_for_async(lambda: all(publisher.is_idle for publisher in publishers), PATIENCE_S)
        write_s = time.perf_counter() - begin_s
        entries = sum(publisher.counters.entries for publisher in publishers) - workers
        before, begin_s = replica.counters.events, time.perf_counter()
        reading = group.create_task(replica.run())
        written = {worker: p.position for worker, p in zip(incarnations, publishers, strict=True)}
        await wait_for_async(lambda: replica.positions == written, PATIENCE_S)
        read_s = time.perf_counter() - begin_s
        for task in (*writing, reading):
            task.cancel()
    await redis.aclose()
    applied = replica.counters.events - before
    case = f"{workers} workers, entries of {entry_blocks} blocks"
    return [
        Row(case, "published", entries / write_s, "entries/s"),
        Row(case, "published", entries * entry_blocks / write_s, "blocks/s"),
        Row(case, "applied by a replica", applied / read_s, "entries/s"),
        Row(case, "applied by a replica", applied * entry_blocks / read_s, "blocks/s"),
    ]
