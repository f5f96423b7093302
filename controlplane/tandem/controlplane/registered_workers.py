"""The registered workers as the registry has them now: their addresses, machines and roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from tandem.core.errors import UnavailableError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tandem.statestore.index.registry import RegistryWatcher
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord


class RegisteredWorkers:
    """Follows the registry while `run` runs; before, no worker is known."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._watcher = RegistryWatcher(redis, keys)
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

    def address_of(self, worker: WorkerId) -> str:
        """Return the host:port of its gRPC server; UnavailableError if it is not registered."""
        record = self._records.get(worker)
        if record is None:
            raise UnavailableError(f"worker {worker} is not registered", todo="wait until it is")
        return record.address
