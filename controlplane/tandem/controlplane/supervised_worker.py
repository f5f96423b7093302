"""Per-worker memory of a controller; a new controller works without it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from tandem.controlplane.worker_control import WorkerLook
from tandem.core.backoff import RestartBackoff
from tandem.core.ids import WorkerId


class WorkerPhase(Enum):
    """Phase of a slot.

    WAITING: started when it is due. HANGING: being killed because it did not get ready, or is silent; handled after
    that like any death. FAILED: left alone until the desired state changes.
    """

    WAITING = auto()
    STARTING = auto()
    HANGING = auto()
    READY = auto()
    STOPPING = auto()
    FAILED = auto()


RUNS = (WorkerPhase.STARTING, WorkerPhase.HANGING, WorkerPhase.READY, WorkerPhase.STOPPING)
"""It has a process, or may have one."""


@dataclass(slots=True)
class WorkerStatus:
    """State kept for one worker, over all its restarts."""

    worker_id: WorkerId
    backoff: RestartBackoff
    steps: RestartBackoff
    phase: WorkerPhase = WorkerPhase.WAITING
    start_at_s: float = 0.0
    started_at_s: float = 0.0
    was_ready: bool = False
    step: asyncio.Task[None] | None = None
    step_at_s: float = 0.0
    """No step begins before this moment."""
    is_flipping: bool = False
    deaths: int = 0
    trouble: str = ""
    """How often in a row it died soon after it was ready, or lost its place, and why it ended last."""
    is_unplaced: bool = False
    """It is retried, as there is no room; that has been reported."""
    awaited: str = ""
    """The missing resources of its place, as reported."""
    said: WorkerLook | None = None
    heard_s: float = 0.0
    is_missed: bool = False
    silent_at_s: float | None = None
    """Since when it counts as silent: the last look got no response."""
