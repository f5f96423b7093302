"""What a controller remembers of each worker; a new controller does without."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from tandem.controlplane.control_interface import Look
from tandem.core.backoff import RestartBackoff
from tandem.core.ids import WorkerId


class Phase(Enum):
    """Where a slot stands.

    WAITING: started when it is due. HANGING: being killed because it did not get ready, or says nothing any more; what
    happens then is as after any death. FAILED: left alone until the desired state changes.
    """

    WAITING = auto()
    STARTING = auto()
    HANGING = auto()
    READY = auto()
    STOPPING = auto()
    FAILED = auto()


RUNS = (Phase.STARTING, Phase.HANGING, Phase.READY, Phase.STOPPING)
"""It has a process, or may have one."""


@dataclass(slots=True)
class Slot:
    """What is remembered of one worker, over all its restarts."""

    worker_id: WorkerId
    backoff: RestartBackoff
    steps: RestartBackoff
    phase: Phase = Phase.WAITING
    start_at_s: float = 0.0
    started_at_s: float = 0.0
    was_ready: bool = False
    step: asyncio.Task[None] | None = None
    step_at_s: float = 0.0
    """No step before."""
    is_flipping: bool = False
    deaths: int = 0
    trouble: str = ""
    """How often in a row it died soon after it was ready, or lost its place, and why it ended last."""
    is_unplaced: bool = False
    """It is tried again and again, as there is no room; that has been told."""
    awaited: str = ""
    """What it has no place for want of, as has been told."""
    said: Look | None = None
    heard_s: float = 0.0
    is_missed: bool = False
    silent_at_s: float | None = None
    """The last look at it found nobody; since when it counts as silent."""
