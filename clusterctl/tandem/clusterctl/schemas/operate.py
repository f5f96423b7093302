"""The shapes of documents about a cluster to be started, the desired state, its changes and events; see kinds.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from tandem.clusterctl.confirm import EffectKind
from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import RecordChange
from tandem.core.state_enums import RoleName


class StartModel(TypedDict):
    """`path` None: it would be fetched, and was not looked for."""

    model: str
    path: str | None
    served_names: list[str]


class StartPool(TypedDict):
    """`threads`: of each of the `tp` ranks of each of the `count` workers. `kv_…`: of each worker; None = it is
    computed where the worker starts. With `is_kv_automatic` they are computed from the memory that is free now."""

    model: str
    role: RoleName
    count: int
    tp: int
    threads: int
    hardware: str
    engine: str
    is_kv_automatic: bool
    kv_memory_bytes: int | None
    kv_tokens: int | None
    kv_contexts: float | None


class Start(TypedDict):
    """`is_complete`: all was checked that `up` checks; not where a model would be fetched. Ports: 0 = any free one.
    `redis` None: a private server. `settings`: those that differ from the defaults."""

    is_dry_run: bool
    is_complete: bool
    cluster: str
    state_dir: str
    launcher: Literal["local", "ray"]
    redis: str | None
    host: str
    port: int
    grpc_port: int
    admin_port: int
    cores: int
    models: list[StartModel]
    pools: list[StartPool]
    settings: dict[str, Any]


class Join(TypedDict):
    """`host` None: the address by which this machine reaches the head."""

    is_dry_run: bool
    address: str
    host: str | None
    cpus: int
    gpus: int
    hardware: str
    token_file: str | None


class ModelDocument(TypedDict):
    """A model with a name. `path` None: it was not fetched. `size_bytes`: of its files. `is_default`: `up` without
    `--model` serves it."""

    name: str
    state: Literal["bundled", "fetched", "available"]
    path: str | None
    size_bytes: int
    license: str
    about: str
    is_default: bool


class ModelsDocument(TypedDict):
    """`folder`: where those that were fetched are; None = nowhere."""

    folder: str | None
    models: list[ModelDocument]


class ChangeDocument(TypedDict):
    is_dry_run: bool
    is_changed: bool
    before: DesiredState
    after: DesiredState
    changes: list[RecordChange]


class Effect(TypedDict):
    """Of commands that change something beside the desired state. No `changes`: it was so already."""

    is_dry_run: bool
    is_changed: bool
    changes: list[EffectKind]


class Event(TypedDict):
    """`place`: the cursor to continue after it."""

    place: str
    time_s: float
    event: str
    subject: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PoolRow(Pool):
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


OPERATING = (
    ChangeDocument, Effect, Event, PoolList, RolloutList, WorkerList, Worker, Start, Join, ModelsDocument,
)  # fmt: skip
