"""Entrypoints of the chart's containers.

`python -m tandem.controlplane.container_entrypoints router|worker|up|controller --config FILE …`

Each writes the configuration of its process into its own folder, mode 0600, and becomes that process. With
`--check-config` it only checks the configuration: 0, or 2 with one line on stderr. `drain` is the preStop hook.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from tandem.controlplane.container_entrypoints.helm_release import ReleaseInfo, check_controller
from tandem.controlplane.container_entrypoints.prestop import drain
from tandem.controlplane.container_entrypoints.records import (
    WORKER_PORT,
    PodIdentity,
    WorkerPodRecord,
    check_router,
    check_worker,
    router_config,
    up_config,
    with_password,
    worker_config,
)
from tandem.controlplane.environment import Environment
from tandem.controlplane.local import WORKER_COMMAND
from tandem.controlplane.resolve import log_format
from tandem.controlplane.router_process import ROUTER_COMMAND
from tandem.controlplane.state_dir import StateDir
from tandem.core import config_loader, logs
from tandem.core.clock import MonotonicClock
from tandem.core.config import ClusterConfig, RouterConfig, WorkerConfig
from tandem.core.desired import INITIAL
from tandem.core.errors import ConfigError, StartupError
from tandem.core.files import write_private
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.router.tracing.settings import check_headers
from tandem.statestore.connection import wait_for_redis

UP_COMMAND = (sys.executable, "-m", "tandem.clusterctl", "up")
EXIT_STARTUP = 2
EXIT_TERMINATED = 128 + signal.SIGTERM
_MIN_KEY_BYTES = 16
_REDIS_WITHIN_S = 120.0
"""All pods of a release start at once, that of Redis among them. One that waits in vain ends, and is started again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Become another process, or return 0, or 2 with one line on stderr."""
    wanted = parser().parse_args(arguments)
    try:
        if wanted.part == "drain":
            logs.setup("drain")
            asyncio.run(drain(_config_file(wanted.folder, "worker"), wanted.deadline, MonotonicClock()))
            return 0
        return _run(wanted)
    except OSError as error:
        why = error.strerror or str(error)
        return _say(StartupError(f"cannot use {error.filename}" if error.filename else "the pod cannot start", why=why))
    except StartupError as error:
        return _say(error)


def parser() -> argparse.ArgumentParser:
    """Return the parser of every flag that the chart may set."""
    found = argparse.ArgumentParser(prog="python -m tandem.controlplane.container_entrypoints", description=__doc__)
    parts = found.add_subparsers(dest="part", required=True)
    names = ("router", "worker", "up", "controller")
    router, worker, up, controller = (_with_common(parts.add_parser(name)) for name in names)
    for front in (router, up):
        front.add_argument("--admin-key", type=Path, help="file with the admin key; without it one is drawn")
        front.add_argument("--otlp-headers", type=Path, help="file with headers for the receiver of traces")
        front.add_argument("--otlp-ca", type=Path, help="file with the certificate authority of the receiver of traces")
    up.add_argument("--ray-address", required=True, help="host:port of Ray's head")
    up.add_argument("--ray-token-file", type=Path, required=True, help="file with Ray's token")
    up.add_argument("--timeout", type=float, required=True, help="seconds until the cluster has to be ready")
    worker.add_argument("--pool", required=True)
    worker.add_argument("--role", required=True, type=RoleName, help="with which it starts: prefill, decode or mixed")
    worker.add_argument("--host", required=True, help="address of the pod")
    worker.add_argument("--port", type=int, default=WORKER_PORT)
    worker.add_argument("--cpus", type=int, default=0, help="what the container may use; 0 = all cores")
    worker.add_argument("--revision", default=INITIAL, help="only workers of one revision work together")
    _add_site(controller)
    drained = parts.add_parser("drain")
    drained.add_argument("--folder", type=Path, required=True)
    drained.add_argument("--deadline", type=float, required=True, help="seconds until what still runs is handed back")
    return found


def _add_site(part: argparse.ArgumentParser) -> None:
    part.add_argument("--api", dest="url", required=True, help="of Kubernetes, as a URL")
    part.add_argument("--account", type=Path, required=True, help="folder with token and ca.crt of the service account")
    part.add_argument("--namespace", required=True)
    part.add_argument("--selector", required=True, help="labels of workers' pods")
    part.add_argument("--deployments", required=True, help="what the names of the pools' Deployments begin with")
    part.add_argument("--pool", dest="pools", action="append", required=True, type=_pool, help="NAME=ROLE, each")
    part.add_argument("--autoscaled", action="append", default=[], help="a pool that is scaled from outside")


def _pool(text: str) -> tuple[str, RoleName]:
    name, _, role = text.partition("=")
    return name, RoleName(role)


def _with_common(part: argparse.ArgumentParser) -> argparse.ArgumentParser:
    part.add_argument("--config", type=Path, required=True, help="cluster configuration, TOML or JSON")
    part.add_argument("--name", required=True, help="of the pod")
    part.add_argument("--folder", type=Path, required=True, help="for what is this container's own; in memory")
    part.add_argument("--cluster-secret", type=Path, required=True, help="file with the cluster secret")
    part.add_argument("--redis-password", type=Path, help="file with the password of Redis")
    part.add_argument("--check-config", action="store_true", help="only say whether the configuration is right")
    return part


def _run(wanted: argparse.Namespace) -> int:
    config = config_loader.load(wanted.config, ClusterConfig)
    config = dataclasses.replace(config, log_format=log_format(config, Environment.read()))
    pod = _pod(wanted)
    _check(config, pod, wanted)
    if wanted.check_config:
        sys.stdout.write(f"{wanted.config} is right ({wanted.part})\n")
        return 0
    logs.setup(wanted.part, level=config.log_level, as_json=config.log_format == logs.JSON)
    redis_url = with_password(config.redis.url, pod.redis_password)
    asyncio.run(wait_for_redis(redis_url, within_s=_REDIS_WITHIN_S))
    if wanted.part == "controller":
        from tandem.controlplane.container_entrypoints.controller import control  # only it needs the Kubernetes client

        asyncio.run(control(config, pod, _site(wanted)))
        return 0
    _empty(pod.folder)
    if wanted.part == "router":
        router = router_config(config, pod, _admin_key(wanted.admin_key, pod.folder))
        return _become(ROUTER_COMMAND, _keep(pod, router), threads=1, more=_tracing(wanted))
    if wanted.part == "worker":
        worker = worker_config(config, pod, _seat(wanted))
        return _become(WORKER_COMMAND, _keep(pod, worker), threads=worker.settings.threads)
    _keep_secrets(pod, config.name, wanted.admin_key)
    flags = ["--state-dir", str(pod.folder), "--ray-address", wanted.ray_address]
    flags += ["--ray-token-file", str(wanted.ray_token_file), "--timeout", f"{wanted.timeout:g}"]
    return _become([*UP_COMMAND, *flags], _keep(pod, up_config(config, pod)), threads=1, more=_tracing(wanted))


def _check(config: ClusterConfig, pod: PodIdentity, wanted: argparse.Namespace) -> None:
    """Raise ConfigError or OSError for anything that `wanted.part` could not be started with; change nothing."""
    if wanted.part == "worker":
        check_worker(config, _seat(wanted))
        return
    check_router(config)
    if wanted.part == "up":
        up_config(config, pod)
        wanted.ray_token_file.read_bytes()
    if wanted.part == "controller":
        check_controller(config, _site(wanted))
        return
    _tracing(wanted)
    if wanted.admin_key is not None:
        _read_key(wanted.admin_key)


def _pod(wanted: argparse.Namespace) -> PodIdentity:
    ClusterSecret.load(wanted.cluster_secret)
    password = ""
    if wanted.redis_password is not None:
        password = wanted.redis_password.read_text(encoding="utf-8").strip()
        if not password:
            raise ConfigError(f"{wanted.redis_password} is empty", todo="Put the password of Redis there")
    folder = wanted.folder / wanted.part
    return PodIdentity(name=wanted.name, folder=folder, secret_file=wanted.cluster_secret, redis_password=password)


def _site(wanted: argparse.Namespace) -> ReleaseInfo:
    return ReleaseInfo(**{one.name: getattr(wanted, one.name) for one in dataclasses.fields(ReleaseInfo)})


def _seat(wanted: argparse.Namespace) -> WorkerPodRecord:
    found = WorkerPodRecord(**{one.name: getattr(wanted, one.name) for one in dataclasses.fields(WorkerPodRecord)})
    return dataclasses.replace(found, cpus=found.cpus or Environment.read().cores)


def _empty(folder: Path) -> None:
    """Empty the folder: nothing is left of an earlier run of this container in the same pod."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def _admin_key(given: Path | None, folder: Path) -> Path:
    if given is not None:
        _read_key(given)
        return given
    drawn = folder / "admin.key"
    write_private(drawn, secrets.token_urlsafe(32).encode())
    return drawn


def _read_key(path: Path) -> None:
    if len(path.read_bytes().strip()) < _MIN_KEY_BYTES:
        raise ConfigError(f"the admin key {path} is too short", why=f"at least {_MIN_KEY_BYTES} bytes are needed")


def _tracing(wanted: argparse.Namespace) -> dict[str, str]:
    """Return OpenTelemetry's variables for a router. Raises ConfigError or OSError."""
    found = {}
    if wanted.otlp_headers is not None:
        text = wanted.otlp_headers.read_text(encoding="utf-8").strip()
        check_headers(str(wanted.otlp_headers), text)
        found["OTEL_EXPORTER_OTLP_HEADERS"] = text
    if wanted.otlp_ca is not None:
        wanted.otlp_ca.read_bytes()
        found["OTEL_EXPORTER_OTLP_CERTIFICATE"] = str(wanted.otlp_ca)
    return found


def _keep_secrets(pod: PodIdentity, cluster: str, admin_key: Path | None) -> None:
    """Keep the secrets where `up` looks for its own, so that it draws none."""
    state = StateDir(pod.folder, cluster)
    state.path.mkdir(mode=0o700)
    write_private(state.secret_file, pod.secret_file.read_bytes())
    write_private(state.admin_key_file, _admin_key(admin_key, pod.folder).read_bytes())


def _config_file(folder: Path, part: str) -> Path:
    return folder / part / f"{part}.json"


def _keep(pod: PodIdentity, config: RouterConfig | WorkerConfig | ClusterConfig) -> Path:
    """Write `config` to the pod's own folder, under the name of its part."""
    path = _config_file(pod.folder.parent, pod.folder.name)
    write_private(path, config_loader.dump(config))
    return path


def _become(
    command: Sequence[str], config: Path, *, threads: int, more: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Replace this process by the one that every launcher starts: it gets the pod's signals itself. `more`: variables
    besides those of this process."""
    variables = {**Environment.read().for_child(threads=threads), **more}
    os.execve(command[0], [*command, "--config", str(config)], variables)  # noqa: S606


def _say(error: StartupError) -> int:
    sys.stderr.write(f"tandem pod: {error.message}\n")
    return EXIT_STARTUP


if __name__ == "__main__":
    # The kernel sends a container's first process no signal that it does not handle, and fetching a model takes long.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    sys.exit(main())
