"""From what people configured to what is started: defaults filled in, mistakes found before any process runs."""

from __future__ import annotations

import dataclasses
import errno
import socket
from dataclasses import dataclass

from tandem.cluster.bundled import bundled_model
from tandem.cluster.environment import Environment
from tandem.cluster.worker_settings import check_fit, check_transports, check_workers, share_out
from tandem.core.config import ClusterConfig, Disaggregation, PoolSection, RouterSection, WorkerSection
from tandem.core.desired import DesiredState, Pool
from tandem.core.errors import ConfigError, ModelError, StartupError
from tandem.core.lifecycle import RoleName
from tandem.engine.model_config import DTYPES, read_model_config
from tandem.engine.model_source import ModelSource, resolve_model, weight_files

_DTYPES = ("auto", *DTYPES)
_HIGHEST_PORT = 65535
_SHORTEST_CONTEXT = 16
"""Tokens; the requests with which workers and routers try themselves out have to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCluster:
    """A cluster that can be started: the model is on disk, the counts can serve, the ports are free or 0."""

    config: ClusterConfig
    model: ModelSource
    served_names: tuple[str, ...]
    pools: tuple[Pool, ...]
    router: RouterSection
    workers: dict[RoleName, WorkerSection]
    """What workers of each role are set to."""


def resolve(config: ClusterConfig, environment: Environment) -> ResolvedCluster:
    """Check `config` and fill in its defaults; raises StartupError. May download a model from the hub."""
    _check_settings(config)
    counts = _counts(config.pools)
    check_transports(config, counts)
    router = resolve_ports(config.router)
    has_weights = config.worker.engine != "sim"
    path = config.model.path or str(bundled_model())
    model = resolve_model(path, revision=config.model.revision, has_weights=has_weights)
    _check_model(model, has_weights=has_weights)
    pools = tuple(
        Pool(name=role.value, model=model.name, role=role, count=count, revision=model.commit)
        for role, count in counts.items()
        if count
    )
    DesiredState(version=1, pools=pools).validate()
    _check_disaggregation(config, counts)
    check_fit(config, counts, read_model_config(model.path))
    return ResolvedCluster(
        config=config,
        model=model,
        served_names=config.model.served_names or (model.name,),
        pools=pools,
        router=router,
        workers=share_out(config, counts, environment.cores),
    )


def resolve_ports(section: RouterSection) -> RouterSection:
    """The router's section with −1 replaced by the port before + 1, or by 0 (any free one) after a 0."""
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
    """StartupError when a port of the router cannot be listened on."""
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


def _counts(pools: PoolSection) -> dict[RoleName, int]:
    counts = {RoleName.PREFILL: pools.prefill, RoleName.DECODE: pools.decode, RoleName.MIXED: pools.mixed}
    for role, count in counts.items():
        if count < 0:
            raise ConfigError(f"--{role} is {count}", todo="Use 0 or more workers")
    if not any(counts.values()):
        counts.update({RoleName.PREFILL: 1, RoleName.DECODE: 1})
    return counts


def _check_settings(config: ClusterConfig) -> None:
    if config.model.dtype not in _DTYPES:
        raise ConfigError(f"--dtype is {config.model.dtype!r}", todo=f"Use one of {', '.join(_DTYPES)}")
    check_workers(config)
    least = (
        ("--max-model-len", config.model.max_model_len, 0),
        ("router.max_body_bytes", config.router.max_body_bytes, 1),
        ("router.index_memory_bytes", config.router.index_memory_bytes, 1024 * 1024),
        ("store.response_expiry_s", config.store.response_expiry_s, 1),
        ("store.file_expiry_s", config.store.file_expiry_s, 3600),
        ("store.max_file_bytes", config.store.max_file_bytes, 1),
        ("store.max_batch_requests", config.store.max_batch_requests, 1),
        ("store.batch_requests_at_once", config.store.batch_requests_at_once, 1),
        ("admission.max_waiting", config.admission.max_waiting, 1),
        ("admission.quantum_tokens", config.admission.quantum_tokens, 1),
        ("admission.worker_queue_s", config.admission.worker_queue_s, 0),
        ("admission.worker_queue_requests", config.admission.worker_queue_requests, 1),
        *((f"slo.{name}.ttft_s", one.ttft_s, 0) for name, one in config.slo.items()),
        *((f"slo.{name}.itl_s", one.itl_s, 0) for name, one in config.slo.items()),
        *((f"budget.{name}.requests_per_minute", one.requests_per_minute, 0) for name, one in config.budget.items()),
        *((f"budget.{name}.tokens_per_minute", one.tokens_per_minute, 0) for name, one in config.budget.items()),
    )
    for name, value_given, smallest in least:
        if value_given < smallest:
            raise ConfigError(f"{name} is {value_given}", todo=f"Use {smallest} or more")
    if 0 < config.model.max_model_len < _SHORTEST_CONTEXT:
        raise ConfigError(
            f"--max-model-len is {config.model.max_model_len}",
            todo=f"Use {_SHORTEST_CONTEXT} or more, or 0 for what the model allows",
        )
    if config.admission.default_slo and config.admission.default_slo not in config.slo:
        raise ConfigError(
            f"admission.default_slo is {config.admission.default_slo!r}",
            why=f"there are these SLO classes: {', '.join(sorted(config.slo)) or 'none'}",
            todo=f"Add [slo.{config.admission.default_slo}] or name another",
        )
    if "" in config.model.served_names:
        raise ConfigError("--served-model-name is empty", todo="Give the name that requests will carry")
    if config.redis.volatile_url:
        raise ConfigError(
            "redis.volatile_url cannot be used yet",
            why="registry and desired state share one server for now",
            todo="Name that one in redis.url",
        )


def _check_disaggregation(config: ClusterConfig, counts: dict[RoleName, int]) -> None:
    has_pair = counts[RoleName.PREFILL] and counts[RoleName.DECODE]
    if config.router.disaggregation is Disaggregation.ALWAYS and not has_pair:
        raise ConfigError(
            "--disaggregation always cannot work",
            why="every answer has to cross from a prefill to a decode worker, and one of them is missing",
            todo="Add --prefill 1 --decode 1, or use --disaggregation auto",
        )


def _check_model(model: ModelSource, *, has_weights: bool) -> None:
    if not (model.path / "config.json").is_file():
        raise ModelError(
            f"{model.path} is no model", why="it has no config.json", todo="Give a folder in Hugging Face format"
        )
    read_model_config(model.path)
    for name in weight_files(model.path) if has_weights else ():
        if not (model.path / name).is_file():
            raise ModelError(f"{model.path} is not complete", why=f"{name} is missing", todo="Download the model again")
