"""Resolves a configuration for the start: defaults filled in, mistakes found before any process runs."""

from __future__ import annotations

import dataclasses
import errno
import logging
import socket
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.controlplane.environment import LOG_FORMAT, Environment
from tandem.controlplane.kv_plan import KVPlan, kv_plan
from tandem.controlplane.model_catalog import located, with_default
from tandem.controlplane.resolved_models import ResolvedModel, check_models, resolve_models, total
from tandem.controlplane.up_flag_map import name_of
from tandem.controlplane.worker_settings import check_fit, check_transports, check_workers, divide_cores
from tandem.core import logs
from tandem.core.bounds import out_of_bounds
from tandem.core.config import ClusterConfig, LauncherName, PlannerMode, RouterSection, WorkerSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import ConfigError, StartupError
from tandem.core.state_enums import RoleName
from tandem.core.timeout_scale import PATIENCE, PATIENCE_VARIABLE, patient
from tandem.engine.model_config import read_model_config
from tandem.router.tracing.settings import check_endpoint

_HIGHEST_PORT = 65535
T = TypeVar("T", ClusterConfig, WorkerSection, RouterSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCluster:
    """A cluster that can be started: models are on disk, their counts can serve, the ports are free or 0."""

    config: ClusterConfig
    models: tuple[ResolvedModel, ...]
    router: RouterSection
    workers: dict[RoleName, WorkerSection]
    """Settings of the workers of each role."""

    @property
    def served_names(self) -> tuple[str, ...]:
        return tuple(name for model in self.models for name in model.served_names)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the pools that have workers."""
        return tuple(pool for model in self.models for pool in model.pools if pool.count)

    def desired(self, version: int) -> DesiredState:
        """Return the configured state as the desired state of that version. Pools without workers can be scaled up
        later."""
        pools = tuple(pool for model in self.models for pool in model.pools)
        return DesiredState(version=version, pools=pools, max_ranks=self.config.max_ranks).filled()

    def kv_of(self, pool: Pool) -> KVPlan:
        """Return the KV size of each worker of `pool`, as far as it can be computed here."""
        model, settings = self.model_of(pool), self.workers[pool.role]
        return kv_plan(
            model.source.path,
            settings,
            dtype=model.dtype,
            quantize=model.quantize,
            max_model_len=model.max_model_len,
        )

    def model_of(self, pool: Pool) -> ResolvedModel:
        """Return the model that the workers of `pool` compute."""
        return next(model for model in self.models if model.source.name == pool.model)


def resolve(config: ClusterConfig, environment: Environment) -> ResolvedCluster:
    """Check `config` and fill in its defaults; raises StartupError. May download a model from the hub."""
    check(config)
    root = environment.models_root
    config = with_patience(located(with_default(config, root), root))
    router = resolve_ports(config.router)
    counts = total(config)
    models = resolve_models(config)
    for model in models:
        check_fit(config, model.counts, read_model_config(model.source.path))
    resolved = ResolvedCluster(
        config=dataclasses.replace(config, log_format=log_format(config, environment)),
        models=models,
        router=router,
        workers=divide_cores(config, counts, environment.cores, environment.free_bytes),
    )
    resolved.desired(1).validate()
    _check_planner(resolved)
    return resolved


def _check_planner(resolved: ResolvedCluster) -> None:
    """Raise ConfigError for a cluster that the planner cannot plan for."""
    section, pools = resolved.config.planner, resolved.pools
    if section.mode is PlannerMode.OFF:
        return
    what, off = f"planner.mode is {section.mode}", "or set planner.mode to off"
    if len(resolved.models) > 1:
        why = f"it plans for one model, and there are {len(resolved.models)}"
        raise ConfigError(what, why=why, todo=f"Leave out [[models]], {off}")
    if len({(pool.tp, pool.hardware) for pool in pools}) > 1:
        why = "it takes all workers to be alike, and their TP or hardware differs"
        raise ConfigError(what, why=why, todo=f"Give all roles the same, {off}")
    count = sum(pool.count for pool in pools)
    if 0 < section.budget < count:
        why = f"{count} workers are configured"
        raise ConfigError(f"planner.budget is {section.budget}", why=why, todo="Raise it, or start fewer")


def check(config: ClusterConfig) -> RouterSection:
    """Check `config` by itself: raises ConfigError. Returns the router's section with its ports."""
    check_level(config.log_level)
    _check_format("--log-format", config.log_format)
    _check_settings(config)
    check_transports(config, total(config))
    return resolve_ports(config.router)


def check_level(level: str) -> None:
    """Raise ConfigError for an unknown log level."""
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level is {level!r}", todo="Use DEBUG, INFO, WARNING or ERROR")


def with_patience(config: ClusterConfig) -> ClusterConfig:
    """Return `config` with the limits that users set, too, as patient as this process. ConfigError if it is to have
    another patience than that."""
    if config.patience not in (0, PATIENCE):
        raise ConfigError(
            f"{name_of('patience')} is {config.patience:g}",
            why=f"this process has loaded with {PATIENCE:g}",
            todo=f"Set {PATIENCE_VARIABLE}={config.patience:g} before it starts",
        )
    worker = _longer(config.worker, "step_slow_s", "step_watchdog_s")
    router = _longer(config.router, "request_timeout_s", "stall_s")
    return _longer(dataclasses.replace(config, worker=worker, router=router), "replace_silent_s")


def _longer(section: T, *names: str) -> T:
    longer: dict[str, Any] = {name: patient(getattr(section, name)) for name in names}
    return dataclasses.replace(section, **longer)


def log_format(config: ClusterConfig, environment: Environment) -> str:
    """Return the format in `config`, else the environment's, else text. ConfigError for an unknown one."""
    said = environment.variables.get(LOG_FORMAT, "")
    _check_format("--log-format", config.log_format)
    _check_format(LOG_FORMAT, said)
    return config.log_format or said or logs.TEXT


def _check_format(name: str, said: str) -> None:
    if said and said not in logs.FORMATS:
        raise ConfigError(f"{name} is {said!r}", todo=f"Use {' or '.join(logs.FORMATS)}")


def resolve_ports(section: RouterSection) -> RouterSection:
    """Return the router's section with −1 replaced by the port before + 1, or by 0 (any free one) after a 0."""
    grpc = _following(section.port) if section.grpc_port < 0 else section.grpc_port
    admin = _following(grpc) if section.admin_port < 0 else section.admin_port
    ports = {"--port": section.port, "--grpc-port": grpc, "--admin-port": admin}
    for flag, port in ports.items():
        if not 0 <= port <= _HIGHEST_PORT:
            raise ConfigError(f"{flag} is {port}", why=f"ports go from 0 (any free one) to {_HIGHEST_PORT}")
    given = [port for port in ports.values() if port]
    if len(set(given)) < len(given):
        what = ", ".join(f"{flag} {port}" for flag, port in ports.items())
        raise ConfigError("two of the router's ports are the same", why=what, todo="Give each its own")
    return dataclasses.replace(section, grpc_port=grpc, admin_port=admin)


def check_ports(section: RouterSection) -> None:
    """Raise StartupError when a port of the router cannot be listened on."""
    # The admin port listens on loopback whatever the API's host is.
    ports = (
        ("--port", section.host, section.port),
        ("--grpc-port", section.host, section.grpc_port),
        ("--admin-port", "127.0.0.1", section.admin_port),
    )
    for flag, host, port in ports:
        if port:
            _check_port(flag, host, port)


def _check_port(flag: str, host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is taken",
                why="another program listens there",
                todo=f"Choose another with {flag}, or stop that program",
            ) from error
        raise StartupError(
            f"cannot listen on {host}:{port}", why=error.strerror or str(error), todo=f"Correct --host or {flag}"
        ) from error


def _following(port: int) -> int:
    return port + 1 if port else 0


def _check_patience(config: ClusterConfig) -> None:
    said, name = config.patience, name_of("patience")
    if 0 < said < 1:
        raise ConfigError(f"{name} is {said:g}", why="it makes bounds longer", todo="Use 1 or more, or leave it out")
    if said > 1 and config.launcher is LauncherName.RAY:
        todo = f"Set {PATIENCE_VARIABLE} on every machine instead"
        raise ConfigError(f"{name} is {said:g}", why="it does not reach Ray's other machines", todo=todo)


def _check_settings(config: ClusterConfig) -> None:
    for place, value, bound in out_of_bounds(config):
        raise ConfigError(f"{name_of(place)} is {value}", todo=f"Use {bound}")
    _check_patience(config)
    check_models(config)
    check_workers(config)
    if config.tracing.endpoint:
        check_endpoint("tracing.endpoint", config.tracing.endpoint)
    if config.admission.default_slo and config.admission.default_slo not in config.slo:
        raise ConfigError(
            f"admission.default_slo is {config.admission.default_slo!r}",
            why=f"there are these SLO classes: {', '.join(sorted(config.slo)) or 'none'}",
            todo=f"Add [slo.{config.admission.default_slo}] or name another",
        )
    if config.redis.volatile_url:
        raise ConfigError(
            "redis.volatile_url cannot be used yet",
            why="registry and desired state share one server for now",
            todo="Name that one in redis.url",
        )
