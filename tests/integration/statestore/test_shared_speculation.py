"""Routers on a real server share their dispatches; without each other, or without the server, they go on."""

from typing import Any

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.shared_speculation import SharedSpeculation, unpack
from tandem.statestore.keys import Keys
from tests.integration.statestore.conftest import block

KEYS = Keys("test")
W, INCARNATION = WorkerId("w1"), Incarnation(5)
HASHES = [block(n) for n in range(3)]


def probe(spec: SharedSpeculation, clock: ManualClock, request: str) -> None:
    """Send something in a moment in which it would find out that it is not alone."""
    clock.advance(2.0)
    spec.expect(request, W, INCARNATION, HASHES[:1])


async def test_two_routers_know_what_either_sent(redis: Any, until: Any, running: Any) -> None:
    clocks = [ManualClock(), ManualClock()]
    one, two = (SharedSpeculation(redis, KEYS, clock, Incarnation(n)) for n, clock in enumerate(clocks, 1))
    async with running(one.run(), two.run()):

        def is_heard() -> bool:
            if not two.blocks:
                probe(one, clocks[0], "probe")
            return two.blocks > 0 and not one.is_alone

        await until(is_heard)
        one.expect("r", W, INCARNATION, HASHES)
        await until(lambda: two.lookup(HASHES) == {(W, INCARNATION): 3})
        one.withdraw("r", W)
        await until(lambda: two.lookup(HASHES) == {(W, INCARNATION): 1})
        one.expect("r2", W, INCARNATION, HASHES)
        one.settle("r2", W)
        one.settle("probe", W)
        await until(lambda: two.lookup(HASHES) == {(W, INCARNATION): 3})
        two.expect("r3", W, INCARNATION, [block(9)])
        two.expect("r4", W, INCARNATION, [block(9)])
        for spec in (one, two):
            spec.check_integrity()


async def test_the_end_is_told_of_what_there_is_no_room_for_any_more(redis: Any, until: Any, running: Any) -> None:
    clock = ManualClock()
    one = SharedSpeculation(redis, KEYS, clock, Incarnation(1), max_blocks=4)
    two = SharedSpeculation(redis, KEYS, ManualClock(), Incarnation(2))
    full, other = [block(n) for n in range(10, 14)], WorkerId("w2")
    async with running(one.run(), two.run()):
        await until(lambda: _subscribers(redis, 2))

        def is_heard() -> bool:
            if not two.blocks:
                probe(one, clock, "probe")
            return two.blocks > 0 and not one.is_alone

        await until(is_heard)
        one.expect("r", other, INCARNATION, HASHES)
        await until(lambda: two.lookup(HASHES).get((other, INCARNATION)) == 3)
        one.expect("full", W, INCARNATION, full)
        assert not one.withdraw("r", other), "it was pushed out"
        await until(lambda: (other, INCARNATION) not in two.lookup(HASHES))


async def test_whoever_is_alone_says_little(
    redis: Any, server: PrivateRedis, client: Any, until: Any, running: Any
) -> None:
    async with client(server.url) as other:
        clock = ManualClock()
        one = SharedSpeculation(redis, KEYS, clock, Incarnation(1))
        async with running(one.run()):
            await until(lambda: _subscribers(redis, 1))
            probe(one, clock, "first")
            await until(lambda: _published(redis))
            pubsub = other.pubsub()
            await pubsub.subscribe(KEYS.sent_channel)
            await until(lambda: _subscribers(redis, 2))
            for number in range(50):  # it does not know yet
                one.expect(f"r{number}", W, INCARNATION, HASHES)
            probe(one, clock, "second")
            heard: list[bytes] = []

            async def has_come() -> bool:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=0.01)
                heard.extend([message["data"]] if message else [])
                return bool(heard)

            await until(has_come)
            requests = [news.request for message in heard for news in unpack(message)[1]]
            assert requests == ["second"]
            await pubsub.aclose()


async def test_rubbish_and_outages_are_survived(redis: Any, until: Any, running: Any) -> None:
    clocks = [ManualClock(), ManualClock()]
    one, two = (SharedSpeculation(redis, KEYS, clock, Incarnation(n)) for n, clock in enumerate(clocks, 1))
    async with running(one.run(), two.run()):
        await until(lambda: _subscribers(redis, 2))
        for message in (b"", b"\xff" * 30, b"\0" * 200):
            await redis.publish(KEYS.sent_channel, message)
        await redis.client_kill_filter(_type="pubsub")
        await until(lambda: _subscribers(redis, 2))
        two.expect("x" * 300, W, INCARNATION, HASHES)  # no name for a message

        def is_heard() -> bool:
            probe(two, clocks[1], "r")
            return one.blocks > 0

        await until(is_heard)
        assert one.lookup(HASHES) == {(W, INCARNATION): 1}


async def _subscribers(redis: Any, count: int) -> bool:
    ((_, found),) = await redis.pubsub_numsub(KEYS.sent_channel)
    return int(found) == count


async def _published(redis: Any) -> bool:
    return bool((await redis.info("commandstats")).get("cmdstat_publish"))
