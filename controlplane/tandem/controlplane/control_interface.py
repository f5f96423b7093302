"""Interface to running workers: their reported state, and the orders they take."""

from __future__ import annotations

from typing import Protocol

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName


class Look(Protocol):
    """The state that a worker reports."""

    @property
    def state(self) -> str:
        """One of ready, draining, drained and flipping."""

    @property
    def role(self) -> RoleName: ...

    @property
    def target(self) -> RoleName | None:
        """The role that it is about to take."""

    @property
    def flip_failure(self) -> str:
        """Why the last order to change the role failed; "" = it did not."""


class WorkerControlClient(Protocol):
    """Controls workers. Every call is idempotent and answered at once; longer effects are seen by looking again.
    Raises TandemError when it is not answered, or refused."""

    async def look(self, worker: WorkerId) -> Look: ...
    async def drain(self, worker: WorkerId, deadline_s: float) -> object: ...
    async def uncordon(self, worker: WorkerId) -> object: ...
    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float) -> object: ...
