"""What a controller asks of a place where workers can run: this machine, later Ray or Kubernetes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.core.config import WorkerConfig
from tandem.core.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start: its configuration, and how many threads it may compute with."""

    config: WorkerConfig
    threads: int = 1

    @property
    def worker_id(self) -> WorkerId:
        return WorkerId(self.config.worker_id)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """A starting worker says what it is doing."""

    worker_id: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker takes requests now; `details` is what it says about itself."""

    worker_id: WorkerId
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone, with all its processes; `reason` is one line."""

    worker_id: WorkerId
    reason: str


WorkerReport = WorkerProgress | WorkerReady | WorkerExited


class Launcher(Protocol):
    """Starts and stops workers and reports on them. It decides nothing: restarts are the controller's."""

    async def start_worker(self, spec: WorkerSpec) -> None:
        """Start a worker whose id is not running. Whatever goes wrong is reported as WorkerExited."""

    async def stop(self, worker_id: WorkerId, *, grace_s: float) -> None:
        """End a worker and return when it is gone; after `grace_s` by force. Nothing happens for an unknown id."""

    def watch(self) -> AsyncIterator[WorkerReport]:
        """Every report in order, for one reader, for as long as it reads."""
