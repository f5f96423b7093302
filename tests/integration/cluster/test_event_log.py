"""Events in a real Redis: newest first, bounded, and no trouble for anybody when Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster import event_log
from tandem.cluster.event_log import EventLog, events_key
from tandem.core.events import ClusterEvent, EventKind
from tandem.prefixindex.connection import connect
from tandem.prefixindex.private_redis import PrivateRedis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateRedis]:
    with PrivateRedis.start(tmp_path / "redis", "hush") as server:
        yield server


def test_newest_first_and_bounded(server: PrivateRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_EVENTS", 3)
    shown: list[ClusterEvent] = []

    async def run() -> list[ClusterEvent]:
        redis = await connect(server.url)
        log = EventLog("c", redis, on_event=shown.append, wall_clock=lambda: 7.0)
        storing = asyncio.create_task(log.run())
        for number in range(5):
            log.record(EventKind.STARTED, f"w-{number}", "because")
        await log.flush()
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        lines = await redis.lrange(events_key("c"), 0, -1)
        await redis.aclose()
        return [ClusterEvent.from_json(line) for line in lines]

    stored = asyncio.run(run())
    assert len(shown) == 5
    assert stored == list(reversed(shown[-3:]))
    assert stored[0] == ClusterEvent(time_s=7.0, kind=EventKind.STARTED, subject="w-4", reason="because")


def test_recording_goes_on_without_redis(server: PrivateRedis) -> None:
    async def run() -> None:
        redis = await connect(server.url)
        log = EventLog("c", redis)
        server.stop()
        for number in range(1000):
            log.record(EventKind.EXITED, f"w-{number}", "because")
        await asyncio.wait_for(log.flush(), 10)
        await redis.aclose()

    asyncio.run(run())
