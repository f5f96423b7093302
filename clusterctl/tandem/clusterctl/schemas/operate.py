"""The shapes of documents about the desired state, its changes and events; see kinds.py."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Role = Literal["prefill", "decode", "mixed"]


class WantedPool(TypedDict):
    name: str
    model: str
    role: Role
    count: int
    revision: str
    tp: int
    hardware: str


class WantedMember(TypedDict):
    """`drain_deadline_s` null: the record's."""

    worker_id: str
    pool: str
    role: Role
    is_cordoned: bool
    restart_generation: int
    revision: str
    drain_deadline_s: float | None


class WantedRevision(TypedDict):
    """`settings`: by their place in the configuration, such as worker.chunk_tokens."""

    name: str
    model: str
    model_path: str
    settings: dict[str, str]


class WantedRollout(TypedDict):
    """`sizes`: by pool, how many workers there are to be."""

    model: str
    revision: str
    previous: str
    sizes: dict[str, int]
    phase: Literal["rolling", "paused", "failed", "done"]
    reason: str
    is_undo: bool
    max_surge: int
    max_unavailable: int


class DesiredDocument(TypedDict):
    version: int
    pools: list[WantedPool]
    members: list[WantedMember]
    max_ranks: int
    drain_deadline_s: float
    is_stopped: bool
    revisions: list[WantedRevision]
    rollouts: list[WantedRollout]


class WorkerChange(TypedDict):
    deed: Literal["start", "stop", "flip", "drain", "uncordon", "restart"]
    worker_id: str
    detail: str


class ChangeDocument(TypedDict):
    is_dry_run: bool
    is_changed: bool
    before: DesiredDocument
    after: DesiredDocument
    changes: list[WorkerChange]


class DeedDone(TypedDict):
    deed: Literal["create", "set", "stop", "revoke", "release"]
    subject: str
    detail: str


class Effect(TypedDict):
    """Of commands that change something beside the desired state. No `changes`: it was so already."""

    is_dry_run: bool
    is_changed: bool
    changes: list[DeedDone]


class Event(TypedDict):
    """`place`: the cursor to continue after it."""

    place: str
    time_s: float
    event: str
    subject: str
    reason: str


class PoolRow(WantedPool):
    ready: int


class PoolList(TypedDict):
    version: int
    max_ranks: int
    items: list[PoolRow]


class RolledPool(TypedDict):
    """`new`: workers of the rollout's revision, of which `ready` serve; `old`: all others."""

    pool: str
    wanted: int
    new: int
    ready: int
    old: int


class RolloutRow(TypedDict):
    """`phase` "none": there was no rollout yet."""

    model: str
    revision: str
    previous: str
    phase: Literal["none", "rolling", "paused", "failed", "done"]
    reason: str
    is_undo: bool
    max_surge: int
    max_unavailable: int
    model_path: str
    settings: dict[str, str]
    pools: list[RolledPool]


class RolloutList(TypedDict):
    version: int
    items: list[RolloutRow]


class WorkerRow(TypedDict):
    worker: str
    pool: str
    is_wanted: bool
    wanted_role: str
    role: str
    state: str
    is_cordoned: bool
    restart_generation: int
    in_flight: int
    incarnation: str
    address: str
    pid: int


class WorkerList(TypedDict):
    version: int
    items: list[WorkerRow]


class Worker(WorkerRow):
    """`said`: its row of a Status document."""

    said: dict[str, Any] | None
    events: list[Event]


CHANGING = (ChangeDocument, Effect, Event, PoolList, RolloutList, WorkerList, Worker)
