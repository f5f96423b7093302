"""The shapes of documents about what is wanted of a cluster, what changes and what happened; see documents.py."""

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
    worker_id: str
    pool: str
    role: Role
    is_cordoned: bool
    restart_generation: int
    revision: str


class Desired(TypedDict):
    version: int
    pools: list[WantedPool]
    members: list[WantedMember]
    max_ranks: int
    drain_deadline_s: float
    is_stopped: bool


class WorkerChange(TypedDict):
    deed: Literal["start", "stop", "flip", "drain", "uncordon", "restart"]
    worker_id: str
    detail: str


class Change(TypedDict):
    is_dry_run: bool
    is_changed: bool
    before: Desired
    after: Desired
    changes: list[WorkerChange]


class Event(TypedDict):
    """`place`: where to go on after it."""

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


CHANGING = (Change, Event, PoolList, WorkerList, Worker)
