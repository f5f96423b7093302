"""Publisher and replica on a real server: what is offered is seen, what is fenced is not, what is lost comes back."""

import hashlib
from typing import Any

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.ids import WorkerId, new_incarnation
from tandem.statestore.index.events import MEMBER_BYTES, BlockChange, BlockEvent
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys, Member

KEYS = Keys("test")


def block(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest()[:16])


async def test_blocks_are_found_by_depth_and_group(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    one, two = hosted_worker(redis, KEYS, "w1"), hosted_worker(redis, KEYS, "w2")
    replica = IndexReplica(redis, KEYS)
    await one.register()
    await two.register()
    one.store(0, 1, 2, 3)
    async with running(one.publisher.run(), two.publisher.run(), replica.run()):
        replica.set_workers({one.id: one.incarnation, two.id: two.incarnation})
        two.store(0, 1)
        two.change(BlockChange.STORED, (0, 1), group=1)
        prompt = [block(n) for n in range(5)]
        await until(lambda: replica.lookup(prompt) == {"w1": 4, "w2": 2})
        await until(lambda: replica.lookup(prompt, 1) == {"w2": 2})
        assert replica.lookup(prompt[1:]) == {"w1": 3, "w2": 1}
        assert replica.lookup(prompt, 2) == {}
        assert replica.lookup([]) == {}
        one.change(BlockChange.REMOVED, (3, 2, 1))
        await until(lambda: replica.lookup(prompt) == {"w1": 1, "w2": 2})
        two.change(BlockChange.CLEARED)
        await until(lambda: replica.lookup(prompt) == {"w1": 1})
        replica.set_workers({two.id: two.incarnation})
        assert replica.lookup(prompt) == {}
        replica.check_integrity()


async def test_a_late_reader_needs_the_set_not_the_stream(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", entry_blocks=1, stream_entries=1)
    await worker.register()
    async with running(worker.publisher.run()):
        worker.store(*range(500))
        await until(lambda: worker.publisher.is_idle)
        assert await redis.xlen(KEYS.events(worker.id, worker.incarnation)) < 500
        replica = IndexReplica(redis, KEYS)
        replica.set_workers({worker.id: worker.incarnation})
        async with running(replica.run()):
            await until(lambda: replica.holdings(worker.id) == worker.truth)
        assert replica.positions == {worker.id: worker.publisher.position}
        assert worker.publisher.position.blocks == len(worker.truth)


async def test_a_reader_that_fell_behind_reads_again(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    worker = hosted_worker(redis, KEYS, "w1", entry_blocks=1, stream_entries=1)
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    await worker.register()
    replica.set_workers({worker.id: worker.incarnation})
    async with running(worker.publisher.run()):
        async with running(replica.run()):
            worker.store(0)
            await until(lambda: replica.holdings(worker.id) == worker.truth)
        worker.store(*range(1, 400))  # without a reader meanwhile, and the stream is trimmed
        await until(lambda: worker.publisher.is_idle)
        async with running(replica.run()):
            await until(lambda: replica.holdings(worker.id) == worker.truth)
        assert replica.counters.gaps == 1
        assert replica.counters.rereads == 1


async def test_a_silent_loss_is_found_by_heartbeats(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    """The replica is made to forget a block: only the digest can show it."""
    worker = hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    worker.store(1, 2, 3)
    seen: dict[Any, Any] = {}
    async with running(worker.publisher.run(), replica.run(), worker.beat(seen.__setitem__)):
        await until(lambda: bool(seen))
        replica.set_workers(seen)
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        follower = replica._followers[worker.id]
        assert follower.bit is not None
        replica._table.remove(follower.bit, [(0, block(2))])
        follower.at = follower.at._replace(digest=follower.at.digest ^ 1)
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        assert replica.counters.mismatches >= 1


async def test_an_entry_that_contradicts_its_check_is_not_trusted(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS)
    await worker.register()
    worker.store(1)
    replica.set_workers({worker.id: worker.incarnation})
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    async with running(replica.run()):
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        forged = {"m": "append", "s": b"\0" + block(2), "r": b"", "k": "1:0"}
        await redis.xadd(KEYS.events(worker.id, worker.incarnation), forged, id="2-0")
        await until(lambda: replica.counters.mismatches > 0 and replica.counters.rereads > 0)
        await until(lambda: replica.holdings(worker.id) == worker.truth)


@pytest.mark.parametrize(
    "strange",
    [
        {"other": "fields"},
        {"m": "append", "s": b"", "r": b""},
        {"m": "append", "s": b"\0" * (MEMBER_BYTES + 1), "r": b"", "k": "2:0"},
        {"m": "append", "s": b"", "r": b"\0", "k": "1:0"},
        {"m": "merge", "s": b"", "r": b"", "k": "1:0"},
    ],
    ids=["other fields", "no check", "half a member stored", "half a member removed", "unknown mode"],
)
async def test_what_is_no_entry_is_survived(
    redis: Any, strange: dict[str, Any], until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", lease_s=60)
    replica = IndexReplica(redis, KEYS)
    await worker.register()
    worker.store(1)
    replica.set_workers({worker.id: worker.incarnation})
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    for key in (KEYS.events(worker.id, worker.incarnation), KEYS.blocks(worker.id, worker.incarnation)):
        await redis.persist(key)
    async with running(replica.run()):
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        await redis.xadd(KEYS.events(worker.id, worker.incarnation), strange, id="2-0")
        await until(lambda: replica.counters.unreadable > 0 and replica.counters.rereads > 0)
        assert replica.holdings(worker.id) == worker.truth
        async with running(worker.publisher.run()):  # finds the stream elsewhere and publishes again
            worker.store(2)
            await until(lambda: replica.holdings(worker.id) == worker.truth)


@pytest.mark.parametrize("rubbish", [{"seq": "many"}, {"count": ""}, {"digest": "no number"}, {}])
async def test_a_heartbeat_that_cannot_be_read_is_survived(
    redis: Any, rubbish: dict[str, str], until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", lease_s=60)
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    await worker.register()
    worker.store(1)
    replica.set_workers({worker.id: worker.incarnation})
    async with running(worker.publisher.run(), replica.run()):
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        if rubbish:
            await redis.hset(KEYS.lease(Member.WORKER, worker.id), mapping=rubbish)
        else:
            await redis.hdel(KEYS.lease(Member.WORKER, worker.id), "seq", "count", "digest")
        await until(lambda: replica.counters.unreadable > 0)
        worker.store(2)
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        assert replica.counters.rereads == 0


async def test_a_reader_that_hears_of_entries_it_never_gets_reads_again(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    await worker.register()
    replica.set_workers({worker.id: worker.incarnation})
    async with running(worker.publisher.run()):
        async with running(replica.run()):
            worker.store(1)
            await until(lambda: replica.holdings(worker.id) == worker.truth)
        worker.store(2)
        await until(lambda: worker.publisher.is_idle)
    last = worker.publisher.position
    assert await redis.xdel(KEYS.events(worker.id, worker.incarnation), f"{last.seq}-0") == 1
    assert await worker.lease.beat(*last)
    async with running(replica.run()):
        await until(lambda: replica.holdings(worker.id) == worker.truth)
    assert replica.counters.gaps >= 1


async def test_a_sequence_number_is_never_used_twice(
    redis: Any, until: Any, running: Any, hosted_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry is written, its answer is lost, and the worker registers again under the same incarnation."""
    worker = hosted_worker(redis, KEYS, "w1")
    await worker.register()
    worker.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(worker.publisher, "_settle", lambda *_: None)
        await worker.publisher._write(worker.publisher._next_entry())
    worker.change(BlockChange.REMOVED, (1,))
    worker.store(2)
    await worker.register(worker.incarnation)
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    key = KEYS.blocks(worker.id, worker.incarnation)
    assert await redis.smembers(key) == {b"\0" + block(2)}


async def test_a_repeated_entry_changes_nothing(
    redis: Any, until: Any, running: Any, hosted_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to an entry is lost and the same entry is sent again."""
    worker = hosted_worker(redis, KEYS, "w1")
    await worker.register()
    worker.store(1)
    with monkeypatch.context() as patch:
        patch.setattr(worker.publisher, "_settle", lambda *_: None)
        await worker.publisher._write(worker.publisher._next_entry())
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    assert worker.publisher.counters.gaps == 0
    assert await redis.xlen(KEYS.events(worker.id, worker.incarnation)) == 1


async def test_a_stale_incarnation_is_never_visible(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    zombie, heir = hosted_worker(redis, KEYS, "w1"), hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS)
    await zombie.register()
    zombie.store(1, 2)
    async with running(zombie.publisher.run(), heir.publisher.run(), replica.run()):
        replica.set_workers({zombie.id: zombie.incarnation})
        await until(lambda: replica.lookup([block(1)]) == {"w1": 1})
        await heir.register()
        replica.set_workers({heir.id: heir.incarnation})
        assert replica.lookup([block(1)]) == {}
        before = zombie.publisher.position
        zombie.store(3, 4)
        heir.store(9)
        await until(lambda: zombie.publisher.is_lost)
        await until(lambda: replica.lookup([block(9)]) == {"w1": 1})
        assert replica.lookup([block(3)]) == {}
        assert zombie.publisher.position.blocks == before.blocks
        assert await redis.scard(KEYS.blocks(zombie.id, zombie.incarnation)) == 2
        # Even a reader that still believes in the zombie sees none of its events after the takeover.
        replica.set_workers({zombie.id: zombie.incarnation})
        await until(lambda: replica.lookup([block(1)]) == {"w1": 1})
        assert replica.lookup([block(3)]) == {}


@pytest.mark.parametrize("until_ms", [None, 1], ids=["by its own clock", "by the clock of Redis"])
async def test_who_was_given_up_publishes_nothing_though_its_lease_is_back(
    redis: Any, until: Any, running: Any, hosted_worker: Any, until_ms: int | None
) -> None:
    limit: list[int | None] = [0]
    worker = hosted_worker(redis, KEYS, "w1", lease_s=60, until_ms=lambda: limit[0])
    await worker.register()
    worker.store(1)
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
        entries = await redis.xlen(KEYS.events(worker.id, worker.incarnation))
        limit[0] = until_ms
        worker.store(2)
        await until(lambda: worker.publisher.counters.refused >= 2)
        assert worker.publisher.is_lost
        assert await redis.scard(KEYS.blocks(worker.id, worker.incarnation)) == 1
        assert await redis.xlen(KEYS.events(worker.id, worker.incarnation)) == entries
        limit[0] = 0
        before = worker.incarnation
        await worker.register()
        await until(lambda: worker.publisher.is_idle)
        assert await redis.scard(KEYS.blocks(worker.id, worker.incarnation)) == 2
        assert await redis.scard(KEYS.blocks(worker.id, before)) <= 1


async def test_publishing_waits_for_the_lease(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    worker.store(1)
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_lost)
        assert not await redis.exists(KEYS.blocks(worker.id, worker.incarnation))
        await worker.lease.register(worker.record())  # without renew: it notices by itself
        await until(lambda: worker.publisher.is_idle)
        assert await redis.scard(KEYS.blocks(worker.id, worker.incarnation)) == 1


async def test_every_key_of_the_index_expires(redis: Any, until: Any, running: Any, hosted_worker: Any) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    await worker.register()
    worker.store(1)
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    for key in (KEYS.events(worker.id, worker.incarnation), KEYS.blocks(worker.id, worker.incarnation)):
        assert 0 < await redis.pttl(key) <= 10_000


@pytest.mark.parametrize("loss", ["blocks", "events", "both", "everything", "foreign", "last entry"])
async def test_what_redis_lost_is_published_again(
    redis: Any, loss: str, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    worker.store(1, 2, 3)

    def follow(name: Any, incarnation: Any) -> None:
        replica.set_workers({name: incarnation})

    async with running(worker.publisher.run(), replica.run(), worker.beat(follow)):
        await until(lambda: worker.truth and replica.holdings(worker.id) == worker.truth)
        events, blocks = (f(worker.id, worker.incarnation) for f in (KEYS.events, KEYS.blocks))
        republished = worker.publisher.counters.republished
        match loss:
            case "everything":
                await redis.flushall()
            case "foreign":
                await redis.sadd(blocks, b"\0" * 17)
            case "last entry":
                await redis.xdel(events, (await redis.xrevrange(events, count=1))[0][0])
            case _:
                await redis.delete(*{"blocks": [blocks], "events": [events]}.get(loss, [events, blocks]))
        await until(lambda: worker.publisher.counters.republished > republished)
        worker.store(4)
        await until(lambda: worker.publisher.is_idle and replica.holdings(worker.id) == worker.truth)
        key = KEYS.blocks(worker.id, worker.incarnation)
        assert len(await redis.smembers(key)) == 4


async def test_the_same_incarnation_can_be_registered_again(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1")
    replica = IndexReplica(redis, KEYS, check_s=0.05)
    await worker.register()
    worker.store(1, 2)
    async with running(worker.publisher.run(), replica.run()):
        replica.set_workers({worker.id: worker.incarnation})
        await until(lambda: replica.holdings(worker.id) == worker.truth)
        for number in range(3, 8):
            await worker.register(worker.incarnation)
            worker.store(number)
            await until(lambda: replica.holdings(worker.id) == worker.truth)
        assert worker.publisher.counters.outages == 0


async def test_offers_never_wait_and_an_overflow_republishes_everything(
    redis: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    worker = hosted_worker(redis, KEYS, "w1", max_pending_blocks=100)
    await worker.register()
    worker.store(*range(1000))
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    worker.change(BlockChange.REMOVED, tuple(range(900)))  # without a writer: it piles up
    assert worker.publisher.counters.overflows == 1
    async with running(worker.publisher.run()):
        await until(lambda: worker.publisher.is_idle)
    assert worker.publisher.counters.republished == 2
    assert await redis.scard(KEYS.blocks(worker.id, worker.incarnation)) == 100


async def test_changes_that_cancel_out_are_not_written(redis: Any) -> None:
    publisher = BlockEventPublisher(redis, KEYS, WorkerId("w1"), new_incarnation())
    publisher._must_reset = False
    publisher.offer([BlockEvent(BlockChange.STORED, (block(1), block(2)))])
    publisher.offer([BlockEvent(BlockChange.STORED, (block(1),)), BlockEvent(BlockChange.REMOVED, (block(3),))])
    publisher.offer([BlockEvent(BlockChange.REMOVED, (block(1), block(2)))])
    assert publisher.is_idle
