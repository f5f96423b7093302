"""What the router keeps in and reads from Redis: its own lease, the workers, the index, the wish to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from redis.asyncio import Redis

from tandem.core.errors import ConfigError, TandemError, UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.liveness import BEAT_S
from tandem.core.logs import event
from tandem.prefixindex.desired_store import DesiredStateStore
from tandem.prefixindex.keys import Keys
from tandem.prefixindex.lease import RouterLease
from tandem.prefixindex.records import RouterRecord, WorkerRecord
from tandem.prefixindex.registry import RegistryWatcher
from tandem.prefixindex.replica import IndexReplica
from tandem.router import workers

_log = logging.getLogger(__name__)
_TRIES = 20


class RedisDirectory:
    """The registry as the worker table reads it; keeps the index replica on the same workers."""

    def __init__(self, redis: Redis, keys: Keys, replica: IndexReplica) -> None:
        self._watcher = RegistryWatcher(redis, keys)
        self._replica = replica

    async def run(self, on_change: Callable[[Mapping[WorkerId, workers.WorkerRecord]], None]) -> None:
        def changed(records: Mapping[WorkerId, WorkerRecord]) -> None:
            self._replica.set_workers({worker: record.incarnation for worker, record in records.items()})
            on_change(records)

        await self._watcher.run(changed)

    def note_beat(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._watcher.note_beat(worker, incarnation)


async def hold_lease(lease: RouterLease, record: RouterRecord) -> None:
    """Register and beat until cancelled; an outage is waited out, a lapse ends in a new registration."""
    is_held = False
    try:
        while True:
            try:
                if not is_held:
                    await lease.register(record)
                is_held = await lease.beat()
            except UnavailableError as error:
                event(_log, "no lease", logging.WARNING, why=error.message)
            await asyncio.sleep(BEAT_S)
    finally:
        try:
            async with asyncio.timeout(1.0):
                await lease.deregister()
        except (TandemError, TimeoutError, RuntimeError):
            event(_log, "could not deregister", logging.WARNING)


async def ask_to_stop(store: DesiredStateStore) -> None:
    """Write the wish that the whole cluster ends; raises ConfigError when nobody reconciles it."""
    for _ in range(_TRIES):
        state = await store.load()
        if state is None:
            raise ConfigError("nothing says what this cluster should be", todo="stop the processes that were started")
        if state.is_stopped:
            return
        if await store.save(replace(state, version=state.version + 1, is_stopped=True), state.version):
            return
    raise UnavailableError("the desired state keeps changing", todo="try again")
