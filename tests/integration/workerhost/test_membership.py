"""Registration, beats, and what losing the registry or the lease does to an incarnation. On a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.config import WorkerConfig
from tandem.core.errors import UnavailableError
from tandem.core.ids import GroupId, Incarnation, WorkerId
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.member_lease import WorkerLease
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.keys import Keys, Member
from tandem.statestore.records import WorkerRecord
from tandem.workerhost.membership import Membership
from tools.waiting import wait_for_async


class Watched:
    """A membership with its callbacks recorded, on a clock that only the test moves."""

    def __init__(self, url: str, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock(100.0)
        self.leases: list[float] = []
        self.renewed: list[Incarnation] = []
        config = WorkerConfig(
            cluster="test", worker_id="w0", role=RoleName.DECODE, pool="decode", model="m", model_dir="", revision="",
            dtype="auto", max_model_len=0, redis_url=url, secret_file="", runtime_dir="",
        )  # fmt: skip
        self.membership = Membership(config, self.leases.append, self.renewed.append, self.clock)


@asynccontextmanager
async def joined(folder: Path, clock: ManualClock | None = None) -> AsyncIterator[tuple[Watched, Incarnation, Redis]]:
    with PrivateRedis.start(folder, "a-test-password") as server:
        watched = Watched(server.url, clock)
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


async def registered(redis: Redis) -> int:
    value = await redis.hget(Keys("test").lease(Member.WORKER, "w0"), "incarnation")
    return int(value or 0)


async def test_beats_extend_the_lease_and_blocks_are_published(tmp_path: Path) -> None:
    async with joined(tmp_path) as (watched, incarnation, redis):
        assert await registered(redis) == incarnation
        block = BlockHash(b"0123456789abcdef")
        watched.membership.publish([(GroupId(0), block, False)])
        key = Keys("test").blocks(WorkerId("w0"), incarnation)
        await wait_for_async(lambda: redis.scard(key))
        before = len(watched.leases)
        watched.clock.advance(1.0)
        await wait_for_async(lambda: len(watched.leases) > before and watched.leases[-1] == 103.5)
        await wait_for_async(lambda: watched.membership.counters()["tandem_index_publishing_total{kind=entries}"] > 0)
        assert watched.membership.counters()["tandem_index_publishing_total{kind=overflows}"] == 0
        await watched.membership.leave()
        assert await registered(redis) == 0


@pytest.mark.parametrize(("has_lapsed", "keeps_incarnation"), [(False, True), (True, False)])
async def test_a_lost_registry_entry(tmp_path: Path, has_lapsed: bool, keeps_incarnation: bool) -> None:
    """Redis forgot us. Within the lease we are still ourselves; after it, only a new incarnation is safe."""
    async with joined(tmp_path) as (watched, incarnation, redis):
        if has_lapsed:
            watched.clock.advance(10.0)
        await redis.flushall()
        await wait_for_async(lambda: registered(redis))
        assert (await registered(redis) == incarnation) is keeps_incarnation
        await wait_for_async(lambda: bool(watched.renewed) is not keeps_incarnation)


async def test_a_late_acknowledgement_does_not_revive(tmp_path: Path) -> None:
    """After a stop, pings that waited in the socket arrive first; the worker must still get a new incarnation."""
    async with joined(tmp_path) as (watched, incarnation, redis):
        watched.clock.advance(2.6)
        granted = list(watched.leases)
        watched.membership.acknowledged()
        assert watched.leases == granted
        await wait_for_async(lambda: bool(watched.renewed))
        assert await registered(redis) == watched.renewed[0] != incarnation


async def test_a_lease_that_an_old_dump_puts_back_is_not_ours_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lapsed, and the store holds it again under the same incarnation. Until there is a new one nothing is sent."""
    register, may_register = WorkerLease.register, asyncio.Event()
    asked: list[Incarnation] = []

    async def gated(lease: WorkerLease, record: WorkerRecord) -> None:
        asked.append(record.incarnation)
        if len(asked) > 1:
            await may_register.wait()
        await register(lease, record)

    monkeypatch.setattr(WorkerLease, "register", gated)
    async with joined(tmp_path) as (watched, before, redis):
        membership, keys = watched.membership, Keys("test")
        lease, blocks = keys.lease(Member.WORKER, "w0"), keys.blocks(WorkerId("w0"), before)
        events = keys.events(WorkerId("w0"), before)
        membership.publish([(GroupId(0), BlockHash(b"0123456789abcdef"), False)])
        await wait_for_async(lambda: redis.scard(blocks))
        dump = await redis.dump(lease)
        assert dump is not None
        watched.clock.advance(10.0)
        await wait_for_async(lambda: len(asked) == 2)
        await redis.restore(lease, 60_000, dump, replace=True)
        published = await redis.xlen(events)
        refused = membership.counters()["tandem_index_publishing_total{kind=refused}"]
        membership.publish([(GroupId(0), BlockHash(b"fedcba9876543210"), False)])
        await wait_for_async(lambda: membership.counters()["tandem_index_publishing_total{kind=refused}"] > refused)
        assert (await redis.scard(blocks), await redis.xlen(events)) == (1, published)
        assert await registered(redis) == before, "as the dump has it"
        may_register.set()
        await wait_for_async(lambda: watched.renewed)
        assert await registered(redis) == watched.renewed[0] == asked[1] != before
        await wait_for_async(lambda: redis.scard(keys.blocks(WorkerId("w0"), watched.renewed[0])))
        assert await redis.scard(blocks) <= 1
        counters = membership.counters()
        assert counters["tandem_worker_rejoins_total{incarnation=new}"] == 1
        assert counters["tandem_worker_rejoins_total{incarnation=same}"] == 0


async def test_a_state_stands_in_the_record_also_after_a_new_registration(tmp_path: Path) -> None:
    async def record(redis: Redis) -> WorkerRecord | None:
        raw = await redis.hget(Keys("test").lease(Member.WORKER, "w0"), "record")
        return None if raw is None else WorkerRecord.from_json(raw)

    async with joined(tmp_path) as (watched, incarnation, redis):
        first = await record(redis)
        assert first is not None
        assert first.state == "ready"
        await watched.membership.say_state(WorkerState.DRAINING)
        assert await record(redis) == replace(first, state="draining")
        await redis.flushall()
        await wait_for_async(lambda: record(redis))
        assert await record(redis) == replace(first, state="draining")
        assert await registered(redis) == incarnation


async def test_another_role_is_another_incarnation_and_fences_the_one_before(tmp_path: Path) -> None:
    """Later publications of the old incarnation are refused; its blocks stand under the new one."""
    async with joined(tmp_path) as (watched, before, redis):
        membership, keys = watched.membership, Keys("test")
        block = BlockHash(b"0123456789abcdef")
        membership.publish([(GroupId(0), block, False)])
        await wait_for_async(lambda: redis.scard(keys.blocks(WorkerId("w0"), before)))
        old = BlockEventPublisher(redis, keys, WorkerId("w0"), before)
        after = await membership.take_role(RoleName.PREFILL)
        assert after != before
        assert await registered(redis) == membership.incarnation == after
        assert watched.renewed == [], "whoever asked for it knows"
        await wait_for_async(lambda: redis.scard(keys.blocks(WorkerId("w0"), after)))
        old.offer([BlockEvent(BlockChange.STORED, (BlockHash(b"fedcba9876543210"),), GroupId(0))])
        late = asyncio.create_task(old.run())
        await wait_for_async(lambda: old.is_lost)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert await redis.scard(keys.blocks(WorkerId("w0"), before)) == 1
        assert await redis.scard(keys.blocks(WorkerId("w0"), after)) == 1


@pytest.mark.parametrize("has_come_through", [False, True])
async def test_a_role_that_could_not_be_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_come_through: bool
) -> None:
    """The worker keeps its incarnation, and the next beat puts the registry right."""
    register = WorkerLease.register
    asked: list[Incarnation] = []

    async def lossy(lease: WorkerLease, record: WorkerRecord) -> None:
        asked.append(record.incarnation)
        if len(asked) != 2:
            await register(lease, record)
            return
        if has_come_through:
            await redis_of[0].hset(Keys("test").lease(Member.WORKER, "w0"), "incarnation", int(record.incarnation))
        raise UnavailableError("Redis does not answer")

    redis_of: list[Redis] = []
    monkeypatch.setattr(WorkerLease, "register", lossy)
    async with joined(tmp_path) as (watched, before, redis):
        redis_of.append(redis)
        with pytest.raises(UnavailableError):
            await watched.membership.take_role(RoleName.PREFILL)
        assert watched.membership.incarnation == before
        beat = Keys("test").lease(Member.WORKER, "w0")
        seen = int(await redis.hget(beat, "beat") or 0)

        async def is_back() -> bool:
            return await registered(redis) == before and int(await redis.hget(beat, "beat") or 0) != seen

        await wait_for_async(is_back)
        record = WorkerRecord.from_json(await redis.hget(beat, "record") or b"")
        assert (record.role, record.incarnation) == ("decode", before)
        assert watched.renewed == []


async def test_a_role_that_was_registered_but_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is lost between the two: the worker keeps its incarnation, and the next beat puts that back."""

    async def lost(redis: Redis, *message: object) -> None:
        raise ConnectionError("lost")

    async with joined(tmp_path) as (watched, before, redis):
        with monkeypatch.context() as outage:
            outage.setattr(Redis, "publish", lost)
            with pytest.raises(UnavailableError):
                await watched.membership.take_role(RoleName.PREFILL)
        assert watched.membership.incarnation == before

        async def is_back() -> bool:
            return await registered(redis) == before

        await wait_for_async(is_back)
        lease = Keys("test").lease(Member.WORKER, "w0")
        record = WorkerRecord.from_json(await redis.hget(lease, "record") or b"")
        assert (record.role, record.incarnation) == ("decode", before)
        assert watched.renewed == []


async def test_a_lease_counts_from_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis lets the key expire 2.5 s after it took the beat, however long its answer lies in a socket."""
    clock = ManualClock(100.0)
    beat = WorkerLease.beat

    async def late(lease: WorkerLease, seq: int, count: int, digest: int) -> bool:
        is_held = await beat(lease, seq, count, digest)
        clock.advance(2.0)
        return is_held

    monkeypatch.setattr(WorkerLease, "beat", late)
    async with joined(tmp_path, clock) as (watched, incarnation, _):
        await wait_for_async(lambda: bool(watched.renewed))
        assert watched.leases[:3] == [102.5, 102.5, 106.5]  # the second beat's answer came after the lapse
        assert watched.renewed[0] != incarnation


async def test_a_lease_that_lapses_while_it_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(100.0)
    register = WorkerLease.register
    asked: list[Incarnation] = []

    async def late(lease: WorkerLease, record: WorkerRecord) -> None:
        asked.append(record.incarnation)
        await register(lease, record)
        if len(asked) == 2:
            clock.advance(2.6)

    monkeypatch.setattr(WorkerLease, "register", late)
    async with joined(tmp_path, clock) as (watched, incarnation, redis):
        await redis.flushall()
        await wait_for_async(lambda: bool(watched.renewed))
        assert asked == [incarnation, incarnation, watched.renewed[0]]
        assert watched.renewed[0] != incarnation
        assert await registered(redis) == watched.renewed[0]
