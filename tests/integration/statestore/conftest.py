"""A real server for every test, conditions to wait for instead of times, and a worker as its host would run it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.core.block_hash import BlockHash
from tandem.core.errors import UnavailableError
from tandem.core.ids import Incarnation, WorkerId, new_incarnation
from tandem.statestore.connection import connect
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.events import BlockChange, BlockEvent
from tandem.statestore.index.publisher import BlockEventPublisher
from tandem.statestore.index.registry import WorkerLease, WorkerRecord
from tandem.statestore.keys import Keys
from tools.waiting import wait_for_async

Until = Callable[..., Awaitable[None]]
Running = Callable[..., AbstractAsyncContextManager[None]]


@asynccontextmanager
async def _running(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[Redis]:
    redis = await connect(url)
    try:
        yield redis
    finally:
        await redis.aclose()


def block(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(b"%d" % number).digest()[:16])


class HostedWorker:
    """Lease and publisher of one worker; beats quickly and registers anew when it learns that the lease is lost. Where
    it does not beat, the lease lasts as long as a test may."""

    def __init__(self, redis: Any, keys: Keys, name: str, *, lease_s: float = 60.0, **options: Any) -> None:
        self.id = WorkerId(name)
        self.incarnation = new_incarnation()
        self.is_registered = False
        """Set to False to have `beat` register anew."""
        self.truth: set[tuple[int, BlockHash]] = set()
        self.lease = WorkerLease(redis, keys, lease_s=lease_s)
        self.publisher = BlockEventPublisher(redis, keys, self.id, self.incarnation, check_s=0.05, **options)

    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker=self.id, incarnation=self.incarnation, role="prefill", address="h:1", model="m", fingerprint="f"
        )

    def change(self, kind: BlockChange, numbers: tuple[int, ...] = (), group: int = 0) -> None:
        hashes = tuple(block(n) for n in numbers)
        blocks = {(group, h) for h in hashes}
        if kind is BlockChange.CLEARED:
            self.truth.clear()
        else:
            self.truth = self.truth | blocks if kind is BlockChange.STORED else self.truth - blocks
        self.publisher.offer([BlockEvent(kind, hashes, group)])

    def store(self, *numbers: int) -> None:
        self.change(BlockChange.STORED, numbers)

    async def register(self, incarnation: Incarnation | None = None) -> None:
        self.incarnation = incarnation or new_incarnation()
        await self.lease.register(self.record())
        self.publisher.renew(self.incarnation)

    async def beat(self, on_incarnation: Callable[[WorkerId, Incarnation], None] = lambda *_: None) -> None:
        while True:
            try:
                if self.is_registered:
                    self.is_registered = await self.lease.beat(*self.publisher.position) and self.is_registered
                if not self.is_registered:
                    await self.register()
                    on_incarnation(self.id, self.incarnation)
                    self.is_registered = True
            except UnavailableError:
                pass
            await asyncio.sleep(0.05)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateRedis]:
    with PrivateRedis.start(tmp_path / "redis", "a secret") as server:
        yield server


@pytest.fixture
def until() -> Until:
    return wait_for_async


@pytest.fixture
def running() -> Running:
    return _running


@pytest.fixture
def client() -> Callable[[str], AbstractAsyncContextManager[Redis]]:
    return _client


@pytest.fixture
def redis(server: PrivateRedis) -> AbstractAsyncContextManager[Redis]:
    """A client of the server, while a test runs."""
    return _client(server.url)


@pytest.fixture
def hosted_worker() -> type[HostedWorker]:
    return HostedWorker
