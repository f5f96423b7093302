"""Start configurations of this pod's router or worker, from the cluster configuration. Pure, but for model files.

A pod's configuration is an ordinary `ClusterConfig`. Facts that cannot stand in it are given beside it: the pod's name
and address, and where secrets are mounted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from tandem.controlplane import router_process
from tandem.controlplane.model_catalog import located, path_of, refuse_unfetched
from tandem.controlplane.resolve import check
from tandem.controlplane.resolved_models import check_files, resolve_models
from tandem.controlplane.worker_settings import check_fit, effective
from tandem.core.config import ClusterConfig, LauncherName, RouterConfig, WorkerConfig, WorkerSection
from tandem.core.desired import INITIAL
from tandem.core.errors import ConfigError
from tandem.core.state_enums import RoleName
from tandem.engine.memory_plan import free_host_bytes
from tandem.engine.model_config import read_model_config
from tandem.engine.model_source import ModelSource, resolve_model

WORKER_PORT = 7000
"""Default port of a worker's gRPC server: each pod has an address of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """Identity of this pod. `folder` is its own and private; `redis_password` "" = none."""

    name: str
    folder: Path
    secret_file: Path
    redis_password: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPodRecord:
    """A worker's place in the cluster. `cpus`: what the container may use."""

    pool: str
    role: RoleName
    host: str
    cpus: int
    port: int = WORKER_PORT
    revision: str = INITIAL


def check_router(config: ClusterConfig) -> None:
    """Raise ConfigError for a configuration that no router could be started with; looks at no model."""
    check(config)
    refuse_unfetched(config)
    _check_redis(config)


def check_worker(config: ClusterConfig, seat: WorkerPodRecord) -> WorkerSection:
    """Return the settings of a worker there; raises ConfigError, and looks at no model."""
    check(config)
    refuse_unfetched(config)
    _check_redis(config)
    settings = effective(config, seat.role)
    return dataclasses.replace(
        settings,
        threads=settings.threads or max(1, seat.cpus // settings.tp),
        memory_bytes=settings.memory_bytes or free_host_bytes() or 0,  # of this container, which has no other worker
    )


def router_config(config: ClusterConfig, pod: PodIdentity, admin_key_file: Path) -> RouterConfig:
    """Return the configuration of this pod's router; raises StartupError. May fetch tokenizers from the hub, never
    weights."""
    check_router(config)
    without_weights = dataclasses.replace(config, worker=dataclasses.replace(config.worker, engine="sim"))
    found = router_process.router_config(
        config,
        check(config),
        router_id=pod.name,
        models=(model.served() for model in resolve_models(located(without_weights, None))),
        redis_url=with_password(config.redis.url, pod.redis_password),
        secret_file=pod.secret_file,
        admin_key_file=admin_key_file,
        ready_file=pod.folder / "router.ready.json",
        store=config.store,
    )
    return dataclasses.replace(found, has_rollouts=False)


def worker_config(config: ClusterConfig, pod: PodIdentity, seat: WorkerPodRecord) -> WorkerConfig:
    """Return the configuration of this pod's worker; raises StartupError. May fetch the model from the hub."""
    settings = check_worker(config, seat)
    source = _model(config)
    check_fit(config, {seat.role: 1}, read_model_config(source.path))
    return WorkerConfig(
        cluster=config.name,
        worker_id=pod.name,
        role=seat.role,
        pool=seat.pool,
        model=source.name,
        model_dir=str(source.path),
        commit=source.commit,
        revision=seat.revision,
        dtype=config.model.dtype,
        quantize=config.model.quantize,
        quantize_calibration=config.model.quantize_calibration,
        max_model_len=config.model.max_model_len,
        redis_url=with_password(config.redis.url, pod.redis_password),
        secret_file=str(pod.secret_file),
        runtime_dir=str(pod.folder),
        host=seat.host,
        port=seat.port,
        log_level=config.log_level,
        log_format=config.log_format,
        settings=settings,
    )


def up_config(config: ClusterConfig, pod: PodIdentity) -> ClusterConfig:
    """Return the configuration of `up` beside Ray's head; raises ConfigError, and looks at no model."""
    check_router(config)
    if config.launcher is not LauncherName.RAY:
        raise ConfigError(f"launcher is {config.launcher}", why="workers of a pod would have to fit into it")
    raycluster = config.ray.raycluster
    if raycluster.name and not (raycluster.namespace and raycluster.account):
        raise ConfigError("ray.raycluster is incomplete", why="it must have a namespace and an account, too")
    url = with_password(config.redis.url, pod.redis_password)
    return dataclasses.replace(config, redis=dataclasses.replace(config.redis, url=url))


def with_password(url: str, password: str) -> str:
    """Return `url` with the password in it; ConfigError if it has one of its own."""
    if not password:
        return url
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if ":" in user:
        why = "one stands in redis.url, another one in a file"
        raise ConfigError("there are two passwords for Redis", why=why, todo="Leave the first one out")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host if at else parts.netloc}"))


def _model(config: ClusterConfig) -> ModelSource:
    has_weights = config.worker.engine != "sim"
    section = config.model
    source = resolve_model(path_of(section.path, None), revision=section.revision, has_weights=has_weights)
    check_files(source, has_weights=has_weights)
    return source


def _check_redis(config: ClusterConfig) -> None:
    if not config.redis.url:
        why = "the processes of a cluster are in different pods"
        raise ConfigError("redis.url is empty", why=why, todo="Name a server that all pods reach")
