"""Tasks that talk to Redis end when they are cancelled, in any state."""

import asyncio
from typing import Any

import pytest

from tandem.core.errors import StartupError
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys


async def test_a_cancelled_command_is_cancelled_at_every_moment(server: PrivateRedis, client: Any) -> None:
    """Cancel after every number of turns of the event loop, so that each await of the client is hit."""
    for turns in range(60):
        async with client(server.url) as redis:

            async def use(redis: Any = redis) -> None:
                while True:
                    await redis.hset("key", "field", 1)
                    await asyncio.sleep(60)

            tasks = [asyncio.create_task(use()) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=60)
            assert not pending, f"went on after a cancellation at turn {turns}"


async def test_everything_that_runs_ends_when_cancelled_in_an_outage(
    server: PrivateRedis, client: Any, until: Any, running: Any, hosted_worker: Any
) -> None:
    keys = Keys("test")
    async with client(server.url) as redis, asyncio.timeout(120):
        worker = hosted_worker(redis, keys, "w")
        replica, watcher = IndexReplica(redis, keys), RegistryWatcher(redis, keys)
        async with running(worker.publisher.run(), worker.beat(), replica.run(), watcher.run(lambda _: None)):
            await until(lambda: worker.publisher.is_idle and bool(watcher.records))
            replica.set_workers({worker.id: worker.incarnation})
            await until(lambda: bool(replica.positions))
            server.stop()
            await until(lambda: worker.publisher.counters.outages > 0 and replica.counters.outages > 0)


async def test_a_missing_unix_socket_is_named(client: Any, tmp_path: Any) -> None:
    with pytest.raises(StartupError, match="cannot reach Redis at unix:"):
        async with client(f"unix://{tmp_path}/none.sock"):
            pass
