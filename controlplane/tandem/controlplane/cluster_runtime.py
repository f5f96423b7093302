"""A cluster while it runs on this machine: controller, router and Redis side by side, until the last process ends."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx

from tandem.controlplane.controller import Controller
from tandem.controlplane.environment import Environment
from tandem.controlplane.event_log import EventLog
from tandem.controlplane.initial_state import begin
from tandem.controlplane.kuberay_autoscaler.sizer import RayClusterSizer
from tandem.controlplane.launcher import Launcher, WorkerProgress, WorkerReport, WorkerSpec
from tandem.controlplane.live_planner import planner_of
from tandem.controlplane.open_launcher import opened
from tandem.controlplane.prog_name import called
from tandem.controlplane.ray.launcher import RayLauncher
from tandem.controlplane.redis_server import ClusterRedis
from tandem.controlplane.registered_workers import RegisteredWorkers
from tandem.controlplane.resolve import ResolvedCluster
from tandem.controlplane.revisions import revised
from tandem.controlplane.router_process import RouterProcess, router_config
from tandem.controlplane.signals import EXIT_KILLED, Signals
from tandem.controlplane.state_dir import Context, HeldState
from tandem.controlplane.supervised_worker import WorkerPhase
from tandem.controlplane.worker_control import WorkerControlClient
from tandem.core.clock import MonotonicClock
from tandem.core.config import Anonymous, RouterConfig, WorkerConfig
from tandem.core.desired import DesiredWorker, Pool, Revision
from tandem.core.errors import StartupError
from tandem.core.events import FOR_A_PLACE, ClusterEvent, EventKind
from tandem.core.secret import ClusterSecret
from tandem.router.server.registration import Ready
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore

ROUTER_GRACE_S = 10.0
"""Time for a router beyond its own `drain_s`: to send final errors, and to release its holds."""
_POLL_S = 0.1
_STOP_TIMEOUT_S = 30.0
Run = Callable[[], Coroutine[Any, Any, None]]
"""Runs until it is cancelled."""


class RunningCluster:
    """Runs once. The first signal stops everything in order, the second kills what is left, the third ourselves."""

    def __init__(
        self,
        resolved: ResolvedCluster,
        *,
        held: HeldState,
        environment: Environment,
        redis: ClusterRedis,
        sockets: Path,
        say: Callable[[str, str], None],
        worker_command: Sequence[str],
        router_command: Sequence[str],
        as_configured: bool = False,
    ) -> None:
        self._resolved, self._held, self._environment = resolved, held, environment
        self._redis, self._sockets, self._say = redis, sockets, say
        self._worker_command, self._router_command = worker_command, router_command
        self._as_configured = as_configured
        self._name = resolved.config.name
        self._router_grace_s = resolved.router.drain_s + ROUTER_GRACE_S

    async def run(self, signals: Signals, *, ready_timeout_s: float) -> None:
        """Run until a signal or `clusterctl down`; StartupError when the cluster does not become ready in time."""
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        with signals.heard_by(self._on_signal):
            await self._run_until_stopped(ready_timeout_s)

    async def _run_until_stopped(self, ready_timeout_s: float) -> None:
        body = asyncio.create_task(self._run(ready_timeout_s))
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([body, stopped], return_when=asyncio.FIRST_COMPLETED)
            while not body.done():  # again, should a library below have swallowed the first cancellation
                body.cancel()
                await asyncio.wait([body], timeout=self._router_grace_s + _STOP_TIMEOUT_S)
            try:
                await body
            except asyncio.CancelledError:
                if not self._stop.is_set():
                    raise
        finally:
            stopped.cancel()

    async def _run(self, ready_timeout_s: float) -> None:
        redis, keys, clock = await connect(self._redis.url), Keys(self._name), MonotonicClock()
        self._say("redis", "answers")
        try:
            store = DesiredStateStore(redis, keys)
            beginning = await begin(store, self._resolved.desired, as_configured=self._as_configured)
            events = EventLog(ClusterEventStore(redis, keys), on_event=self._show)
            registered = RegisteredWorkers(redis, keys)
            planner = planner_of(self._resolved, redis, events)
            router = RouterProcess(
                self._router_config(),
                held=self._held,
                environment=self._environment,
                events=events,
                clock=clock,
                command=self._router_command,
            )
            async with self._launcher() as launcher:
                controller = Controller(
                    launcher=launcher,
                    desired=store,
                    make_spec=self._worker_spec,
                    events=events,
                    clock=clock,
                    on_report=self._show_report,
                    client=WorkerControlClient(ClusterSecret.load(self._held.state.secret_file), registered.address_of),
                    is_continued=beginning.is_continued,
                    replace_silent_s=self._resolved.config.replace_silent_s,
                )
                events.record(EventKind.CLUSTER_STARTED, self._name, f"`up` in process {os.getpid()}")
                if beginning.kind is not None:
                    events.record(beginning.kind, self._name, beginning.reason)
                following = functools.partial(registered.run, controller.look_again)
                beside: list[Run] = [events.run, following, *([planner.run] if planner is not None else [])]
                try:
                    beside += self._sizing(launcher, store, registered)
                    await self._serve(controller, router, events, beside, ready_timeout_s)
                finally:
                    events.record(EventKind.CLUSTER_STOPPING, self._name, "`up` ends")
                    try:
                        await router.stop(grace_s=self._router_grace_s, hurry=self._hurry)
                    finally:
                        await controller.shutdown()
                        await events.flush()
        finally:
            await redis.aclose()

    def _launcher(self) -> AbstractAsyncContextManager[Launcher]:
        command, say = self._worker_command, self._say
        config, held, environment = self._resolved.config, self._held, self._environment
        return opened(config, held, environment, command=command, hurry=self._hurry, say=say)

    def _sizing(self, launcher: Launcher, store: DesiredStateStore, registered: RegisteredWorkers) -> list[Run]:
        """Return the tasks that keep the RayCluster at the needed size, if there is one that is ours to resize."""
        section = self._resolved.config.ray.raycluster
        if not section.name or not isinstance(launcher, RayLauncher):
            return []
        sizer = RayClusterSizer(
            section,
            load=store.load,
            started=lambda: launcher.nodes,
            hosts=lambda: registered.hosts,
            clock=MonotonicClock(),
            say=self._say,
        )
        return [sizer.run]

    async def _serve(
        self,
        controller: Controller,
        router: RouterProcess,
        events: EventLog,
        beside: Sequence[Run],
        ready_timeout_s: float,
    ) -> None:
        """Run all parts concurrently until the desired state is stopped; the first failure ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                working = group.create_task(controller.run())
                others = [
                    group.create_task(router.run()),
                    *(group.create_task(run()) for run in beside),
                    group.create_task(self._redis.keep(lambda text: self._say("redis", text))),
                    group.create_task(self._announce(controller, router, events, ready_timeout_s)),
                ]
                await working
                self._say("up", "stopping, as `down` asked")
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def _announce(
        self, controller: Controller, router: RouterProcess, events: EventLog, ready_timeout_s: float
    ) -> None:
        """Wait until requests are answered, then print how to send one."""
        began_s = time.monotonic()
        missing: list[str] = []
        try:
            async with asyncio.timeout(ready_timeout_s):
                addresses = await router.wait_ready()
                self._held.write_context(self._context(addresses))
                await controller.wait_ready()
                await _wait_until_serving(addresses.http, missing)
        except TimeoutError:
            waiting = [str(worker) for worker, phase in controller.phases().items() if phase is not WorkerPhase.READY]
            raise StartupError(
                f"the cluster is not ready after {ready_timeout_s:g} s",
                why=f"still waiting for {', '.join(waiting or missing) or 'the router to answer /readyz'}",
                todo=f"Look into {self._held.state.log_dir}",
            ) from None
        events.record(EventKind.CLUSTER_READY, self._name, f"after {time.monotonic() - began_s:.1f} s")
        self._show_addresses(addresses)

    def _on_signal(self) -> None:
        if self._hurry.is_set():
            os._exit(EXIT_KILLED)  # the kernel kills every child with us
        elif self._stop.is_set():
            self._say("up", "killing what is left")
            self._hurry.set()
        else:
            self._say("up", "stopping; once more kills at once")
            self._stop.set()

    def _router_config(self) -> RouterConfig:
        resolved, state = self._resolved, self._held.state
        store = resolved.config.store
        return router_config(
            resolved.config,
            resolved.router,
            router_id="router-0",
            models=(model.served() for model in resolved.models),
            redis_url=self._redis.url,
            secret_file=state.secret_file,
            admin_key_file=state.admin_key_file,
            ready_file=self._sockets / "router-0.ready.json",
            store=dataclasses.replace(store, dir=store.dir or str(state.files_dir)),
        )

    def _worker_spec(self, pool: Pool, member: DesiredWorker, revision: Revision | None) -> WorkerSpec:
        resolved = self._resolved
        model = resolved.model_of(pool)
        started = revised(resolved, model, member.role, revision, self._environment.cores)
        config = WorkerConfig(
            cluster=self._name,
            worker_id=member.worker_id,
            role=member.role,
            pool=pool.name,
            model=pool.model,
            model_dir=str(started.source.path),
            commit=started.source.commit,
            revision=member.revision or pool.revision,
            dtype=model.dtype,
            quantize=model.quantize,
            quantize_calibration=model.quantize_calibration,
            max_model_len=model.max_model_len,
            redis_url=self._redis.url,
            secret_file=str(self._held.state.secret_file),
            runtime_dir=str(self._sockets),
            log_level=resolved.config.log_level,
            log_format=resolved.config.log_format,
            settings=started.settings,
        )
        return WorkerSpec(
            config=config,
            threads=config.settings.threads,
            hardware=pool.hardware,
            restart_generation=member.restart_generation,
        )

    def _context(self, addresses: Ready) -> Context:
        return Context(
            name=self._name,
            pid=os.getpid(),
            api=addresses.http,
            grpc=addresses.grpc,
            admin=addresses.admin,
            admin_key_file=str(self._held.state.admin_key_file),
        )

    def _show(self, happened: ClusterEvent) -> None:
        if happened.kind is EventKind.WAITING and happened.reason.startswith(FOR_A_PLACE):
            return  # its own output reports it (`_show_report`)
        if happened.kind is not EventKind.DESIRED_CHANGED:
            self._say(happened.subject, f"{str(happened.kind).replace('_', ' ')}: {happened.reason}")

    def _show_report(self, report: WorkerReport) -> None:
        if isinstance(report, WorkerProgress):
            self._say(report.worker_id, report.text)

    def _show_addresses(self, addresses: Ready) -> None:
        name = self._resolved.served_names[0]
        messages = '[{"role": "user", "content": "What is the capital of France?"}]'
        body = f'{{"model": "{name}", "messages": {messages}, "max_tokens": 48, "temperature": 0}}'
        self._say("ready", f"API    {addresses.http}/v1")
        self._say("ready", f"gRPC   {addresses.grpc}")
        self._say("ready", f"admin  {addresses.admin}, key in {self._held.state.admin_key_file}")
        self._say("ready", _access(addresses, self._resolved.router.anonymous))
        self._say("ready", "try it; Ctrl-C here stops everything:")
        key = "" if addresses.is_open else "-H 'Authorization: Bearer YOUR KEY' "
        url = f"{addresses.http}/v1/chat/completions"
        self._say("", f"curl -s {url} {key}-H 'Content-Type: application/json' -d '{body}'")


def _access(addresses: Ready, anonymous: Anonymous) -> str:
    """Return which clients are let in, in words."""
    if not addresses.is_open:
        return f"access needs an API key; `{called()} key create --tenant NAME` makes one"
    if anonymous is Anonymous.ALWAYS:
        return "access without an API key, from anywhere (--anonymous always)"
    return f"access without an API key from this machine; the first `{called()} key create --tenant NAME` ends that"


async def _wait_until_serving(base_url: str, missing: list[str]) -> None:
    """Wait until /readyz misses nothing, of no model; until then `missing` holds it. The caller bounds the time."""
    # A child of our own, which was asked at its own address: its certificate names others.
    async with httpx.AsyncClient(trust_env=False, timeout=5.0, verify=False) as client:  # noqa: S501
        while True:
            try:
                answer = await client.get(f"{base_url}/readyz")
                missing[:] = [str(line) for line in answer.json().get("missing", ())]
                if answer.status_code == httpx.codes.OK and not missing:
                    return
            except (httpx.HTTPError, ValueError, AttributeError, TypeError):
                pass  # it may be starting again
            await asyncio.sleep(_POLL_S)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that an operator can act on, out of all concurrent ones."""
    flat: list[BaseException] = []
    waiting: list[BaseException] = [failures]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, StartupError)), flat[0])
