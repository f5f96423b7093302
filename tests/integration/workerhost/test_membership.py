"""Registration, beats, and what losing the registry or the lease does to an incarnation. On a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.core.blockhash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.config import WorkerConfig
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.lifecycle import RoleName
from tandem.prefixindex.connection import connect
from tandem.prefixindex.keys import Keys, Member
from tandem.prefixindex.private_redis import PrivateRedis
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.membership import Membership


class Watched:
    """A membership with its callbacks recorded, on a clock that only the test moves."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock(100.0)
        self.leases: list[float] = []
        self.renewed: list[Incarnation] = []
        config = WorkerConfig(
            cluster="test", worker_id="w0", role=RoleName.DECODE, pool="decode", model="m", model_dir="", revision="",
            dtype="auto", max_model_len=0, redis_url=url, secret_file="", runtime_dir="",
        )  # fmt: skip
        self.membership = Membership(config, self.leases.append, self.renewed.append, self.clock)


@asynccontextmanager
async def joined(folder: Path) -> AsyncIterator[tuple[Watched, Incarnation, Redis]]:
    with PrivateRedis.start(folder, "a-test-password") as server:
        watched = Watched(server.url)
        observer = await connect(server.url)
        incarnation = await watched.membership.join(w.WorkerInfo(worker="w0", role="decode", num_blocks=[4]))
        task = asyncio.create_task(watched.membership.run())
        try:
            yield watched, incarnation, observer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await watched.membership.close()
            await observer.aclose()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def registered(redis: Redis) -> int:
    value = await redis.hget(Keys("test").lease(Member.WORKER, "w0"), "incarnation")
    return int(value or 0)


def test_beats_extend_the_lease_and_blocks_are_published(tmp_path: Path) -> None:
    async def run() -> None:
        async with joined(tmp_path) as (watched, incarnation, redis):
            assert await registered(redis) == incarnation
            block = BlockHash(b"0123456789abcdef")
            watched.membership.publish([(GroupId(0), block, False)])
            key = Keys("test").blocks(WorkerId("w0"), incarnation)
            async with asyncio.timeout(10):
                while not await redis.scard(key):
                    await asyncio.sleep(0.01)
            before = len(watched.leases)
            watched.clock.advance(1.0)
            await eventually(lambda: len(watched.leases) > before and watched.leases[-1] == 103.5)
            await watched.membership.leave()
            assert await registered(redis) == 0

    asyncio.run(run())


@pytest.mark.parametrize(("has_lapsed", "keeps_incarnation"), [(False, True), (True, False)])
def test_a_lost_registry_entry(tmp_path: Path, has_lapsed: bool, keeps_incarnation: bool) -> None:
    """Redis forgot us. Within the lease we are still ourselves; after it, only a new incarnation is safe."""

    async def run() -> None:
        async with joined(tmp_path) as (watched, incarnation, redis):
            watched.membership.is_alive = False
            if has_lapsed:
                watched.clock.advance(10.0)
            await redis.flushall()
            watched.membership.is_alive = True
            async with asyncio.timeout(10):
                while not await registered(redis):
                    await asyncio.sleep(0.01)
            assert (await registered(redis) == incarnation) is keeps_incarnation
            await eventually(lambda: bool(watched.renewed) is not keeps_incarnation)

    asyncio.run(run())


def test_a_late_acknowledgement_does_not_revive(tmp_path: Path) -> None:
    """After a stop, pings that waited in the socket arrive first; the worker must still become somebody else."""

    async def run() -> None:
        async with joined(tmp_path) as (watched, incarnation, redis):
            watched.membership.is_alive = False
            watched.clock.advance(2.6)
            watched.membership.is_alive = True
            granted = list(watched.leases)
            watched.membership.acknowledged()
            assert watched.leases == granted
            await eventually(lambda: bool(watched.renewed))
            assert await registered(redis) == watched.renewed[0] != incarnation

    asyncio.run(run())


def test_no_pulse_no_beat(tmp_path: Path) -> None:
    async def run() -> None:
        async with joined(tmp_path) as (watched, _, _redis):
            watched.membership.is_alive = False
            granted = list(watched.leases)
            watched.membership.acknowledged()
            assert watched.leases == granted

    asyncio.run(run())
