"""Controls workers by id, resolving addresses from the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from tandem.controlplane.worker_control import WorkerControl, WorkerLook
from tandem.core.errors import UnavailableError
from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord


class RegistryControlClient:
    """The controller's `WorkerControlClient`. UnavailableError for a worker that is not registered, and as in
    WorkerControl."""

    def __init__(self, redis: Redis, keys: Keys, control: WorkerControl) -> None:
        self._watcher, self._control = RegistryWatcher(redis, keys), control
        self._records: Mapping[WorkerId, WorkerRecord] = {}

    async def run(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the registry until cancelled. `on_change`: a worker came, left, lapsed, or changed its record."""

        def note(records: Mapping[WorkerId, WorkerRecord]) -> None:
            self._records = dict(records)
            on_change()

        await self._watcher.run(note)

    @property
    def roles(self) -> dict[WorkerId, RoleName]:
        """Return every registered worker with its reported role."""
        known = {role.value: role for role in RoleName}
        return {worker: known[record.role] for worker, record in self._records.items() if record.role in known}

    @property
    def hosts(self) -> dict[WorkerId, str]:
        """Return every registered worker with the address of its machine."""
        return {worker: record.address.rpartition(":")[0] for worker, record in self._records.items()}

    async def look(self, worker: WorkerId) -> WorkerLook:
        return await self._control.look(self._record(worker))

    async def drain(self, worker: WorkerId, deadline_s: float) -> WorkerLook:
        return await self._control.drain(self._record(worker), deadline_s)

    async def uncordon(self, worker: WorkerId) -> WorkerLook:
        return await self._control.uncordon(self._record(worker))

    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float) -> WorkerLook:
        return await self._control.become(self._record(worker), role, deadline_s)

    def _record(self, worker: WorkerId) -> WorkerRecord:
        record = self._records.get(worker)
        if record is None:
            raise UnavailableError(f"worker {worker} is not registered", todo="wait until it is")
        return record
