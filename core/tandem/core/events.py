"""Records of a cluster's actions and their reasons: one for every action of a controller, logged, shown by `up` and
kept bounded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

MAX_EVENTS = 1_000
FOR_A_PLACE = "for a place: "
"""Prefix of the reason of a worker that is WAITING until there is room for it somewhere."""


class EventKind(StrEnum):
    """Kind of event of a member of the cluster, or of the cluster itself."""

    CLUSTER_STARTED = "cluster_started"
    CLUSTER_READY = "cluster_ready"
    CLUSTER_STOPPING = "cluster_stopping"
    DESIRED_CHANGED = "desired_changed"
    DESIRED_KEPT = "desired_kept"
    DESIRED_REPLACED = "desired_replaced"
    STARTED = "started"
    READY = "ready"
    EXITED = "exited"
    RESTART_PLANNED = "restart_planned"
    DRAINING = "draining"
    UNCORDONED = "uncordoned"
    FLIPPING = "flipping"
    FLIPPED = "flipped"
    WAITING = "waiting"
    STEP_FAILED = "step_failed"
    SILENT = "silent"
    HEARD = "heard"
    PREFIXES_SAVED = "prefixes_saved"
    STOPPING = "stopping"
    ROLLOUT = "rollout"
    ADOPTED = "adopted"
    GAVE_UP = "gave_up"
    PLAN_ADVISED = "plan_advised"
    PLAN_ACTED = "plan_acted"
    PLAN_DENIED = "plan_denied"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    """One action and its reason. `time_s`: wall-clock seconds since 1970; `subject`: a worker, router or cluster."""

    time_s: float
    kind: EventKind
    subject: str
    reason: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ClusterEvent:
        """Read back what `to_json` wrote; ValueError or KeyError if it is anything else."""
        data = json.loads(text)
        return cls(
            time_s=float(data["time_s"]),
            kind=EventKind(data["kind"]),
            subject=str(data["subject"]),
            reason=str(data["reason"]),
        )


class EventSink(Protocol):
    """Takes events. Recording must never fail or block the action that it records."""

    def record(self, kind: EventKind, subject: str, reason: str) -> None: ...
