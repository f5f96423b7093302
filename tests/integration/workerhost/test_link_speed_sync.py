"""A host passes its rank's measurements to Redis, and to its rank what others measured from the same host."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tandem.core.errors import UnavailableError
from tandem.core.link_speed import LinkSpeed
from tandem.core.proto_mapping import from_proto, to_proto
from tandem.rpc.v1 import engine_pb2 as e
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.link_speeds import LinkSpeedStore
from tandem.workercore.message_ring import DEFAULT_BYTES
from tandem.workerhost import link_speed_sync
from tandem.workerhost.link_speed_sync import LinkShare
from tools.waiting import wait_for_async

KEYS = Keys("test")
TCP = LinkSpeed(from_host="a", to_host="b", transport="tcp", peer="d0", bytes_per_s=1e9, latency_s=1e-4)


class Host:
    """A share, and its rank's updates."""

    def __init__(self, host: str) -> None:
        self.told: list[LinkSpeed] = []
        self.share = LinkShare(host, self._to_rank)

    def _to_rank(self, message: e.HostToRank) -> None:
        self.told += [from_proto(LinkSpeed, row) for row in message.link_speeds.rows]

    def knows(self, transport: str) -> float:
        return next((row.bytes_per_s for row in reversed(self.told) if row.transport == transport), 0.0)


async def with_hosts(url: str, act: Callable[[Host, Host, Host], Awaitable[None]]) -> None:
    """Two workers on host a and one on host c."""
    redis = await connect(url)
    hosts = (Host("a"), Host("a"), Host("c"))
    try:
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(h.share.run(LinkSpeedStore(redis, KEYS))) for h in hosts]
            await act(*hosts)
            for run in runs:
                run.cancel()
    finally:
        await redis.aclose()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "redis"


def test_a_measurement_reaches_the_other_workers_of_its_host(folder: Path) -> None:
    async def act(one: Host, two: Host, elsewhere: Host) -> None:
        one.share.measured(to_proto(e.LinkMeasured, TCP))
        await wait_for_async(lambda: two.knows("tcp") == 1e9)
        one.share.measured(
            to_proto(e.LinkMeasured, LinkSpeed(from_host="c", to_host="b", transport="shm", bytes_per_s=5e8))
        )
        await wait_for_async(lambda: elsewhere.knows("shm") == 5e8)
        assert elsewhere.knows("tcp") == 0.0  # nothing that is not about its host
        count = len(two.told)
        one.share.measured(
            to_proto(e.LinkMeasured, LinkSpeed(from_host="a", to_host="b", transport="grpc", bytes_per_s=7e8))
        )
        await wait_for_async(lambda: two.knows("grpc") == 7e8)
        assert len(two.told) == count + 1  # an update that it has already is not sent again

    with PrivateRedis.start(folder, "a secret") as server:
        asyncio.run(with_hosts(server.url, act))


def test_a_late_worker_hears_what_was_measured_before(folder: Path) -> None:
    async def first(one: Host, two: Host, elsewhere: Host) -> None:
        one.share.measured(to_proto(e.LinkMeasured, TCP))
        await wait_for_async(lambda: two.knows("tcp") == 1e9)

    async def second(one: Host, two: Host, elsewhere: Host) -> None:
        await wait_for_async(lambda: one.knows("tcp") == 1e9)

    with PrivateRedis.start(folder, "a secret") as server:
        asyncio.run(with_hosts(server.url, first))
        asyncio.run(with_hosts(server.url, second))


def test_many_links_are_told_in_messages_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed_sync, "MAX_ROWS", 3)
    told: list[list[str]] = []
    share = LinkShare("a", lambda message: told.append([row.to_host for row in message.link_speeds.rows]))
    share._tell([replace(TCP, to_host=f"b{number}") for number in range(7)])
    assert told == [["b0", "b1", "b2"], ["b3", "b4", "b5"], ["b6"]]


def test_as_many_links_as_are_told_at_once_fit_the_ring() -> None:
    name = "0123456789abcdef" * 16
    row = LinkSpeed(from_host=name, to_host=name, transport="tcp", peer=name, failure=name * 4, bytes_per_s=1e9)
    rows = [to_proto(e.LinkMeasured, row)] * link_speed_sync.MAX_ROWS
    assert e.HostToRank(link_speeds=e.LinkSpeeds(rows=rows)).ByteSize() < DEFAULT_BYTES // 2


class AwayStore:
    """A Redis that is away for the first write; during which one more link is measured."""

    def __init__(self, share: LinkShare) -> None:
        self._share, self.tries = share, 0
        self.written: asyncio.Queue[list[str]] = asyncio.Queue()

    async def watch(self, on_rows: Callable[[list[LinkSpeed]], None]) -> None:
        return

    async def write(self, rows: list[LinkSpeed]) -> None:
        self.tries += 1
        if self.tries == 1:
            self._share.measured(to_proto(e.LinkMeasured, replace(TCP, peer="d4")))
            raise UnavailableError("Redis does not answer")
        self.written.put_nowait([row.peer for row in rows])


async def test_the_oldest_measurements_go_when_redis_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed_sync, "MAX_WAITING", 3)
    share = LinkShare("a", lambda message: None)
    store = AwayStore(share)
    for peer in ("d1", "d2", "d3"):
        share.measured(to_proto(e.LinkMeasured, replace(TCP, peer=peer)))
    sharing = asyncio.ensure_future(share.run(cast(LinkSpeedStore, store)))
    peers = await asyncio.wait_for(store.written.get(), 60)
    sharing.cancel()
    await asyncio.wait([sharing])
    assert peers == ["d2", "d3", "d4"]
