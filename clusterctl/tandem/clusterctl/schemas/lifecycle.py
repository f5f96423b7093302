"""The shapes of documents about a cluster to be started; see kinds.py."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from tandem.clusterctl.schemas.operate import Role


class StartModel(TypedDict):
    """`path` None: it would be fetched, and was not looked for."""

    model: str
    path: str | None
    served_names: list[str]


class StartPool(TypedDict):
    """`threads`: of each of the `tp` ranks of each of the `count` workers. `kv_…`: of each worker; None = it is
    computed where the worker starts. With `is_kv_automatic` they are computed from the memory that is free now."""

    model: str
    role: Role
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


RUNNING = (Start, Join, ModelsDocument)
