"""Interface between a controller and a place where workers can run: this machine, or Ray's nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.core.config import WorkerConfig
from tandem.core.events import FOR_A_PLACE
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start: its configuration, the number of threads it may compute with, and its class of hardware."""

    config: WorkerConfig
    threads: int = 1
    hardware: str = "any"
    restart_generation: int = 0
    """Kept by the launcher for as long as the worker runs, and reported by `running`: see core/desired.py."""

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.config.worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningWorker:
    """A worker that a launcher has running: how it was started, and whether it took requests since.

    A flip changes its role and leaves this as it was.
    """

    worker_id: WorkerId
    model: str
    role: RoleName
    ranks: int
    revision: str
    restart_generation: int
    is_ready: bool

    @classmethod
    def of(cls, spec: WorkerSpec, *, is_ready: bool) -> RunningWorker:
        """Return the worker that was started with `spec`."""
        config = spec.config
        return cls(
            worker_id=spec.worker_id,
            model=config.model,
            role=config.role,
            ranks=config.settings.tp,
            revision=config.revision,
            restart_generation=spec.restart_generation,
            is_ready=is_ready,
        )


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A starting worker reports its current step."""

    worker_id: WorkerId
    text: str

    @property
    def missing_place(self) -> str:
        """Return FOR_A_PLACE and why it has none yet; "" = it has one, or needs none."""
        verb, _, reason = self.text.partition(" ")
        return reason if verb == "waiting" and reason.startswith(FOR_A_PLACE) else ""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker takes requests now; `details` is its own report."""

    worker_id: WorkerId
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone, with all its processes; `reason` is one line. `is_unplaced`: it never ran, for lack of
    resources. `is_place_lost`: it did not end by itself but with its place, as with its machine. `is_for_good`: no
    worker comes back under this id."""

    worker_id: WorkerId
    reason: str
    is_unplaced: bool = False
    is_place_lost: bool = False
    is_for_good: bool = False


WorkerReport = WorkerProgress | WorkerReady | WorkerExited


class Launcher(Protocol):
    """Starts and stops workers and reports on them. It decides nothing: restarts are the controller's."""

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Start a worker; its id must not be running. Every failure is reported as WorkerExited."""

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        """End a worker and return when it is gone; after `grace_s` by force. Nothing happens for an unknown id."""

    async def running(self) -> Sequence[RunningWorker]:
        """Return every worker that was started and has not ended, by any controller."""

    def watch(self) -> AsyncIterator[WorkerReport]:
        """Yield every report in order, for one reader, for as long as it reads."""


class LauncherBase:
    """The reports of a launcher, for one reader."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[WorkerReport] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[WorkerReport]:
        while True:
            yield await self._reports.get()

    def _pass_on(self, worker_id: WorkerId, said: Mapping[str, Any]) -> bool:
        """Report the progress or readiness in a message of a worker; True if it is ready."""
        if "progress" in said:
            self._reports.put_nowait(WorkerProgress(worker_id, str(said["progress"])))
        elif "ready" in said:
            details = said["ready"] if isinstance(said["ready"], dict) else {}
            self._reports.put_nowait(WorkerReady(worker_id, details))
            return True
        return False
