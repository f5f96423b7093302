"""One worker of one or more ranks as real processes, and how it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.statestore.embedded_redis import PrivateRedis
from tests.integration.worker.pair import RunningWorker, start_worker

ENDS_WITHIN_S = 20.0
"""On a loaded machine; a wait for a lost rank would take at least a minute."""


@asynccontextmanager
async def worker_of(folder: Path, tp: int, **settings: Any) -> AsyncIterator[RunningWorker]:
    """A mixed worker m0 with a router's stream to it; its log is m0.log. The caller's block must make sure that it
    ends."""
    secret = ClusterSecret.generate()
    secret.save(folder / "secret")
    with PrivateRedis.start(folder / "redis", "test-password") as redis:
        worker = await start_worker(folder, "m0", RoleName.MIXED, redis.url, tp=tp, **settings)
        async with asyncio.TaskGroup() as tasks:
            await worker.open(secret, tasks)
            yield worker
            await worker.close()
        await asyncio.wait_for(worker.process.wait(), 60)
        worker.process._transport.close()  # type: ignore[attr-defined]


async def last_words(worker: RunningWorker) -> str:
    """The fatal line, once the worker has ended."""
    assert worker.process.stdout is not None
    fatal = ""
    async with asyncio.timeout(ENDS_WITHIN_S * 2):
        async for raw in worker.process.stdout:
            fatal = json.loads(raw).get("fatal", fatal)
    return fatal
