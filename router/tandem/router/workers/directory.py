"""Registered workers, as Redis has them: the source of the worker table and of the replica of the index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from tandem.core.ids import Incarnation, WorkerId
from tandem.router.workers import table
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord


class RedisDirectory:
    """The registry as the worker table reads it; keeps the index replica on the same workers."""

    def __init__(self, redis: Redis, keys: Keys, replica: IndexReplica) -> None:
        self._watcher = RegistryWatcher(redis, keys)
        self._replica = replica

    async def run(self, on_change: Callable[[Mapping[WorkerId, table.RegisteredAddress]], None]) -> None:
        def changed(records: Mapping[WorkerId, WorkerRecord]) -> None:
            self._replica.set_workers({worker: record.incarnation for worker, record in records.items()})
            on_change(records)

        await self._watcher.run(changed)

    def note_beat(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._watcher.note_beat(worker, incarnation)
