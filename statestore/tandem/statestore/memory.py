"""Memory use of Redis: read now and then, for metrics. Unknown for a server that does not allow the query."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from tandem.statestore.connection import OUTAGE

LOOK_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """Bytes. `most` 0 = the server has no `maxmemory`."""

    used: int
    most: int


async def memory_of(redis: Any) -> RedisMemory:
    """Read the server's memory use; raises what its client raises."""
    found = await redis.info("memory")
    return RedisMemory(int(found.get("used_memory", 0)), int(found.get("maxmemory", 0)))


class MemoryWatch:
    """`run` in a task; `last` is the last value read."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self.last = RedisMemory(0, 0)

    async def run(self) -> None:
        """Look every LOOK_S seconds, until cancelled."""
        while True:
            with suppress(*OUTAGE):  # the last value read stays
                self.last = await memory_of(self._redis)
            await asyncio.sleep(LOOK_S)
