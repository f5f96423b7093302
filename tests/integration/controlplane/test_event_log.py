"""Events in a real Redis: ordered, bounded, readable from any position, and harmless to others when Redis is away."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.controlplane.event_log import EventLog
from tandem.core.errors import InvalidRequestError, UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.events import BEGINNING, ClusterEventStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateRedis]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:
        yield server


def test_in_order_and_bounded(server: PrivateRedis) -> None:
    shown: list[ClusterEvent] = []

    async def run() -> list[ClusterEvent]:
        redis = await connect(server.url)
        store = ClusterEventStore(redis, Keys("c"), max_events=3)
        log = EventLog(store, on_event=shown.append, wall_clock=lambda: 7.0)
        storing = asyncio.create_task(log.run())
        for number in range(5):
            log.record(EventKind.STARTED, f"w-{number}", "because")
        await log.flush()
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        found = await store.last(10)
        await redis.aclose()
        return [happened for _, happened in found]

    stored = asyncio.run(run())
    assert len(shown) == 5
    assert stored == shown[-3:]
    assert stored[-1] == ClusterEvent(time_s=7.0, kind=EventKind.STARTED, subject="w-4", reason="because")


async def test_readers_go_on_where_they_were(server: PrivateRedis) -> None:
    every = [ClusterEvent(time_s=n, kind=EventKind.READY, subject=f"w-{n}", reason="r") for n in range(4)]
    redis = await connect(server.url)
    store = ClusterEventStore(redis, Keys("c"))
    assert await store.last(5) == []
    await store.append(every[:3])
    first = await store.after(BEGINNING, 2)
    assert [happened for _, happened in first] == every[:2]
    await redis.xadd(Keys("c").cluster_events, {b"event": b'{"kind": "of the future"}'})
    await store.append(every[3:])
    rest = await store.after(first[-1][0], 10)
    assert [happened for _, happened in rest] == every[2:]
    assert await store.after(rest[-1][0], 10) == []
    assert [happened for _, happened in await store.last(1)] == every[3:]
    for wrong in ("", "x", "1-2-3", "-", "(1"):
        with pytest.raises(InvalidRequestError, match="is not a position in the events"):
            await store.after(wrong, 1)
    server.stop()
    with pytest.raises(UnavailableError):
        await store.last(1)
    with pytest.raises(UnavailableError):
        await store.after(BEGINNING, 1)
    await redis.aclose()


async def test_pages_of_another_release_are_passed_over(server: PrivateRedis) -> None:
    known = ClusterEvent(time_s=1.0, kind=EventKind.READY, subject="w", reason="r")
    redis = await connect(server.url)
    store = ClusterEventStore(redis, Keys("c"))
    for _ in range(5):
        await redis.xadd(Keys("c").cluster_events, {b"event": b'{"kind": "of the future"}'})
    assert await store.after(BEGINNING, 2) == []
    await store.append([known])
    assert [happened for _, happened in await store.after(BEGINNING, 2)] == [known]
    for _ in range(3):
        await redis.xadd(Keys("c").cluster_events, {b"event": b'{"kind": "of the future"}'})
    ((place, happened),) = await store.last(2)
    assert (happened, await store.after(place, 2)) == (known, []), "whoever follows goes on from there"
    await redis.aclose()


async def test_recording_goes_on_without_redis(server: PrivateRedis) -> None:
    redis = await connect(server.url)
    log = EventLog(ClusterEventStore(redis, Keys("c")))
    server.stop()
    for number in range(1000):
        log.record(EventKind.EXITED, f"w-{number}", "because")
    await asyncio.wait_for(log.flush(), 60)
    await redis.aclose()
