"""The controller of a release, in a pod of its own: the reconcile loop over the pods that Kubernetes has made."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from redis.asyncio import Redis

from tandem.controlplane.container_entrypoints.helm_release import ReleaseInfo, check_controller
from tandem.controlplane.container_entrypoints.records import PodIdentity, with_password
from tandem.controlplane.controller import Controller
from tandem.controlplane.event_log import EventLog
from tandem.controlplane.initial_state import begin
from tandem.controlplane.kubernetes.adoption import Homes
from tandem.controlplane.kubernetes.api import KubernetesApi
from tandem.controlplane.kubernetes.launcher import KubernetesLauncher
from tandem.controlplane.kubernetes.pod_sync import PodFollowing
from tandem.controlplane.launcher import WorkerSpec
from tandem.controlplane.live_planner import planner_of
from tandem.controlplane.registered_workers import RegisteredWorkers
from tandem.controlplane.resolve import ResolvedCluster, check
from tandem.controlplane.resolved_models import resolve_models
from tandem.controlplane.worker_control import WorkerControlClient
from tandem.controlplane.worker_settings import effective
from tandem.core.clock import MonotonicClock
from tandem.core.config import ClusterConfig
from tandem.core.desired import DesiredWorker, Pool, Revision
from tandem.core.errors import InternalError
from tandem.core.events import EventKind
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore


async def control(config: ClusterConfig, pod: PodIdentity, site: ReleaseInfo) -> None:
    """Run until SIGTERM, or until the desired state is stopped; raises StartupError. Workers stay as they are."""
    homes = check_controller(config, site)
    resolved = _resolved(config)
    resolved.desired(1).validate()
    running = asyncio.create_task(_connected(resolved, pod, site, homes))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        return


async def _connected(resolved: ResolvedCluster, pod: PodIdentity, site: ReleaseInfo, homes: Homes) -> None:
    redis = await connect(with_password(resolved.config.redis.url, pod.redis_password))
    try:
        async with KubernetesApi(site.url, site.account, site.namespace) as api:
            launcher = KubernetesLauncher(api, site.selector, homes, model=resolved.models[0].source.name)
            await _controlled(resolved, pod, redis, launcher, homes)
    finally:
        await redis.aclose()


async def _controlled(
    resolved: ResolvedCluster, pod: PodIdentity, redis: Redis, launcher: KubernetesLauncher, homes: Homes
) -> None:
    keys = Keys(resolved.config.name)
    store, events = DesiredStateStore(redis, keys), EventLog(ClusterEventStore(redis, keys))
    beginning = await begin(store, resolved.desired)
    registered = RegisteredWorkers(redis, keys)
    controller = Controller(
        launcher=launcher,
        desired=store,
        make_spec=_no_spec,
        events=events,
        clock=MonotonicClock(),
        client=WorkerControlClient(ClusterSecret.load(pod.secret_file), registered.address_of),
        is_continued=True,
        following=PodFollowing(launcher, homes, lambda: registered.roles, store.save, events),
    )
    planner = planner_of(resolved, redis, events)
    events.record(EventKind.CLUSTER_STARTED, resolved.config.name, f"controller {pod.name}, process {os.getpid()}")
    if beginning.kind is not None:
        events.record(beginning.kind, resolved.config.name, beginning.reason)
    beside: list[Callable[[], Coroutine[Any, Any, None]]] = [
        events.run,
        functools.partial(registered.run, controller.look_again),
        functools.partial(launcher.run, controller.look_again),
        *([planner.run] if planner is not None else []),
    ]
    try:
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(run()) for run in beside]
            await controller.run()
            for task in others:
                task.cancel()
    finally:
        await events.flush()


def _resolved(config: ClusterConfig) -> ResolvedCluster:
    """Resolve models by their names: neither weights nor the cores of this pod matter."""
    without_weights = dataclasses.replace(config, worker=dataclasses.replace(config.worker, engine="sim"))
    return ResolvedCluster(
        config=config,
        models=resolve_models(without_weights),
        router=check(config),
        workers={role: effective(config, role) for role in RoleName},
    )


def _no_spec(pool: Pool, member: DesiredWorker, revision: Revision | None) -> WorkerSpec:
    raise InternalError(f"{member.worker_id} cannot be started here", why="pods start by themselves")
