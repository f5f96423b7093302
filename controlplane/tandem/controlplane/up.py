"""Steps of `clusterctl up`: check everything, start everything, report where each second goes, stop everything.

No process is left behind after a failure: children are stopped on the way out, and the kernel kills them should this
process be killed itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.controlplane.cluster_runtime import RunningCluster
from tandem.controlplane.environment import Environment
from tandem.controlplane.local import WORKER_COMMAND
from tandem.controlplane.model_catalog import BUNDLED, FETCHABLE
from tandem.controlplane.model_download import fetch_named
from tandem.controlplane.redis_server import open_redis
from tandem.controlplane.resolve import ResolvedCluster, check, check_level, check_ports, log_format, resolve
from tandem.controlplane.router_process import ROUTER_COMMAND
from tandem.controlplane.signals import Signals
from tandem.controlplane.state_dir import state_of
from tandem.core import logs
from tandem.core.config import ClusterConfig, WorkerSection
from tandem.core.desired import Pool
from tandem.core.errors import StartupError
from tandem.core.files import expand_user
from tandem.core.lease_timing import LEASE_S
from tandem.core.logs import event
from tandem.core.timeout_scale import PATIENCE, patient

READY_TIMEOUT_S = 300.0
_log = logging.getLogger(__name__)
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class Progress(Protocol):
    """Reports progress to the user."""

    def say(self, part: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """How to start processes, and how long a start may take. `as_configured`: what operators changed is not kept.
    `fetches`: the default model is fetched where it is wanted and missing; if it cannot be, the bundled one serves."""

    worker_command: Sequence[str] = WORKER_COMMAND
    router_command: Sequence[str] = ROUTER_COMMAND
    ready_timeout_s: float = READY_TIMEOUT_S
    as_configured: bool = False
    fetches: bool = False


def up(config: ClusterConfig, environment: Environment, progress: Progress, options: UpOptions | None = None) -> None:
    """Run a cluster in the foreground until it is stopped; raises StartupError when it cannot start.

    Call it on the main thread: it handles SIGINT, SIGTERM and SIGHUP, from now on to the end of the process, and
    children die with the thread that starts them. KeyboardInterrupt when it was stopped before the cluster existed.
    """
    signals = Signals()
    try:
        _up(config, environment, progress, options or UpOptions(), signals)
    except OSError as error:
        raise StartupError(
            f"cannot use {error.filename}" if error.filename else "the cluster cannot run",
            why=error.strerror or str(error),
            todo="Make room, or choose another place with --state-dir" if error.errno in _NO_PLACE else "",
        ) from error
    finally:
        signals.cease()


def _up(
    config: ClusterConfig, environment: Environment, progress: Progress, options: UpOptions, signals: Signals
) -> None:
    state = state_of(config, environment)
    with state.hold() as held:
        held.rotate_logs()
        check_level(config.log_level)
        with _logging_to(state.log_file("up"), config.log_level, log_format(config, environment)):
            resolved = _check(config, environment, progress, fetches=options.fetches)
            held.write_config("cluster", config)
            secret = held.draw_secrets()
            sockets = held.make_socket_dir(environment.socket_root)
            progress.say("redis", "starting a private server" if not config.redis.url else "using the given server")
            with open_redis(config.redis, state, secret, lambda text: progress.say("redis", text)) as redis:
                cluster = RunningCluster(
                    resolved,
                    held=held,
                    environment=environment,
                    redis=redis,
                    sockets=sockets,
                    say=progress.say,
                    worker_command=options.worker_command,
                    router_command=options.router_command,
                    as_configured=options.as_configured,
                )
                signals.keep()
                asyncio.run(cluster.run(signals, ready_timeout_s=patient(options.ready_timeout_s)))
        progress.say("up", "everything is stopped")


def _check(config: ClusterConfig, environment: Environment, progress: Progress, *, fetches: bool) -> ResolvedCluster:
    check_ports(check(config))  # before a model is fetched, which may take long
    fetch_named(config, environment.models_root, progress.say, fetches=fetches)
    for model in (config.model, *config.models):
        if model.path not in ("", BUNDLED, *FETCHABLE) and not expand_user(model.path).exists():
            progress.say("model", f"looking for {model.path}")
    resolved = resolve(config, environment)
    if PATIENCE > 1:
        text = f"{PATIENCE:g} times as long as usual: a process that hangs is given up after {LEASE_S:g} s"
        progress.say("patience", text)
        event(_log, "failure detection is slow", logging.WARNING, patience=PATIENCE, lease_s=LEASE_S)
    for found in resolved.models:
        progress.say("model", f"{found.source.name} in {found.source.path}")
    pools = ", ".join(_pool_text(pool, resolved.workers[pool.role]) for pool in resolved.pools)
    progress.say("plan", f"{pools} on {environment.cores} cores")
    for pool in resolved.pools:
        progress.say("plan", f"{pool.name}: {resolved.kv_of(pool).words()}, in each worker")
    return resolved


def _pool_text(pool: Pool, settings: WorkerSection) -> str:
    """Such as "2 decode (TP 4, 1 thread a rank)"."""
    threads = "1 thread" if settings.threads == 1 else f"{settings.threads} threads"
    ranks = f"TP {settings.tp}, {threads} a rank" if settings.tp > 1 else f"{threads} a worker"
    return f"{pool.count} {pool.name} ({ranks})"


@contextlib.contextmanager
def _logging_to(path: Path, level: str, form: str) -> Iterator[None]:
    """Log to a file; the terminal belongs to progress."""
    root = logging.getLogger()
    handlers, before = list(root.handlers), root.level
    try:
        stream = path.open("a", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {path}", why=error.strerror or str(error)) from error
    try:
        logs.setup("up", level=level, as_json=form == logs.JSON, stream=stream)
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(before)
    finally:
        with contextlib.suppress(OSError):  # the error names the text that the log could not take
            stream.close()
