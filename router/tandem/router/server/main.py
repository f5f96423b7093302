"""The router process: builds the parts, starts HTTP, gRPC and the admin port, and stops them in order."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from fastapi import FastAPI

from tandem.core import logs
from tandem.core.background_loop import LoopWatch, run_beside
from tandem.core.clock import MonotonicClock
from tandem.core.config import PlannerMode, RouterConfig
from tandem.core.config_loader import load
from tandem.core.errors import StartupError, TandemError, UnavailableError
from tandem.core.ids import Incarnation, RouterId, WorkerId, new_incarnation
from tandem.core.memory import freeze_gc, return_large_buffers, use_huge_pages
from tandem.core.secret import ClusterSecret
from tandem.core.urls import host_port
from tandem.router.admin.api_keys import Keyring, KeyStore
from tandem.router.admin.app import AdminLock, OnDown, create_admin_app, live_events, load_key
from tandem.router.admin.demand import DemandReporter
from tandem.router.admin.kv_audit_handlers import AuditHandlers
from tandem.router.admin.multiprocess_admin import whole_scrape
from tandem.router.admin.page.chat import ApiRelay
from tandem.router.admin.page.timeseries import TimeSeries
from tandem.router.admin.routing_handlers import RoutingHandlers
from tandem.router.admin.scaling_handlers import ScalingHandlers, UniqueBlocks, loads_of
from tandem.router.admin.slo_handlers import SloHandlers
from tandem.router.admin.status import StatusPage
from tandem.router.admission.slo_classes import SloClasses
from tandem.router.admission.status import view
from tandem.router.api.frontend import Frontend, create_admission
from tandem.router.api.grpc_service import GrpcDoor
from tandem.router.api.http.app import create_app
from tandem.router.api.http.middleware import AuthMiddleware, ShutdownMiddleware
from tandem.router.api.servers import HttpServer, TlsFiles, bind, port_after, port_of
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.drain_prefix_migration import PrefixMigration
from tandem.router.dispatch.readiness import Readiness
from tandem.router.dispatch.retry_policy import RetryPolicy
from tandem.router.metrics.cluster import ClusterWatch, IndexCollector
from tandem.router.metrics.router import Metrics
from tandem.router.routing.observed_traffic import Popularity
from tandem.router.routing.policies import create_policy
from tandem.router.server.multiprocess import run_processes
from tandem.router.server.registration import Ready, ask_to_stop, hold_lease, write_ready
from tandem.router.server.shutdown import Drain, on_signal
from tandem.router.server.storage import Storage, open_storage
from tandem.router.serving.request_parser import ModelRegistry, RequestParser
from tandem.router.serving.response_stream import ResponseFactory
from tandem.router.storage.batches import concurrency
from tandem.router.storage.batches.runner import BatchRunner
from tandem.router.tenancy.authenticator import Authenticator, TenantSalts
from tandem.router.tenancy.budgets import BudgetBooks, Budgets
from tandem.router.tracing.calls import open_tracing
from tandem.router.workers.connection import Identity, WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder, PrefixIndex
from tandem.router.workers.table import LinkSpeedView, RedisDirectory, WorkerDirectory, WorkerTable
from tandem.statestore.connection import connect
from tandem.statestore.index.events import Position
from tandem.statestore.index.replica import IndexReplica
from tandem.statestore.index.shared_speculation import SharedSpeculation
from tandem.statestore.index.speculation import Speculation
from tandem.statestore.keys import Keys
from tandem.statestore.records import RouterRecord
from tandem.statestore.stores.api_keys import ApiKeyStore
from tandem.statestore.stores.budgets import BudgetStore
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tandem.statestore.stores.link_speeds import LinkSpeedStore
from tandem.statestore.stores.planning import PlanningStore

_log = logging.getLogger(__name__)
EXIT_STARTUP = 2
_PROBE_TEXT = "ready"
SWITCH_INTERVAL_S = 0.0005
"""A thread that reads a long body holds the interpreter for so long at a time. The event loop gives it away with every
look at its sockets, some times for each token: with Python's 5 ms a token came 10 to 20 ms later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Interfaces of a router to the outside: tests put doubles here."""

    directory: WorkerDirectory
    index: PrefixIndex | None
    on_down: OnDown
    keys: KeyStore
    positions: Callable[[], Mapping[WorkerId, Position]] | None = None
    """How far the index was followed, by worker."""
    speeds: LinkSpeedView = field(default_factory=LinkSpeedView)
    storage: Storage | None = None
    budgets: BudgetBooks | None = None
    desired: DesiredStateStore | None = None
    events: ClusterEventStore | None = None
    planning: PlanningStore | None = None
    unique_blocks: UniqueBlocks | None = None
    """How many blocks of KV only one worker holds, by worker."""
    speculation: Speculation | None = None
    """None = of this router's own dispatches."""


class Router:
    """All parts of one router in one event loop. `start` binds, `serve` runs until `stop` is called."""

    def __init__(self, config: RouterConfig, surroundings: Dependencies, incarnation: Incarnation) -> None:
        self.config = config
        self._clock, self._stopping = MonotonicClock(), asyncio.Event()
        self._ports: dict[str, int] = {}
        secret = ClusterSecret.load(Path(config.secret_file))
        admin_key = load_key(Path(config.admin_key_file))
        self.gate = Authenticator(config.settings.anonymous, time.time)
        self._salts = TenantSalts(secret)
        self._lock = AdminLock(admin_key, self.gate)
        classes = SloClasses(config.slo, config.admission.default_slo, config.settings.request_timeout_s)
        self._keyring = Keyring(surroundings.keys, self.gate, lambda: classes.names, time.time)
        self._slo = SloHandlers(classes)
        models = ModelRegistry.load(config.models)
        mode = config.settings.disaggregation
        self.table = WorkerTable(surroundings.directory, surroundings.speeds)
        self.metrics = Metrics(lambda: self.table.links, lambda: len(self.dispatcher.flights))
        speculation = surroundings.speculation or Speculation(self._clock)
        prefixes = PrefixFinder(
            surroundings.index, self._salts.of(""), self.table.link_speed, speculation, Popularity(self._clock)
        )
        retry_policy = RetryPolicy(create_policy(config.settings.policy, mode), config.settings, self._clock)
        probes = {model.name: tuple(model.tokenizer.encode_now(_PROBE_TEXT))[:4] or (0,) for model in models}
        self.readiness = Readiness(self.table, mode, self._clock, probes)
        self.admission = create_admission(config.admission, classes, self.table, self._clock, self.metrics)
        self.dispatcher = Dispatcher(
            self.table, retry_policy, prefixes, self._clock, self.metrics, self.readiness, self.admission
        )
        self.admission.stranded = self.dispatcher.stranded
        self._carrying = self._build_carrying(prefixes, surroundings)
        self.metrics.watch(retry_policy, lambda: self.dispatcher.waiting)
        self._watch = self._build_watch(surroundings)
        self._budgets = Budgets(config.budget, surroundings.budgets, self._clock, self.metrics.refused)
        self.metrics.watch_admission(lambda: self.admission.waiting + self.frontend.intake.waiting)
        self._identity = Identity(router=RouterId(config.router_id), incarnation=incarnation, secret=secret)
        reader = RequestParser(
            models,
            self.table,
            config.settings.request_timeout_s,
            functools.partial(secrets.randbits, 62),
            self._salts.of,
        )
        self._tracing = open_tracing(config, os.environ, self._clock)
        self.frontend = Frontend(
            reader=reader,
            response_factory=ResponseFactory(
                self.dispatcher,
                self.admission,
                self._budgets,
                self.metrics,
                self._clock,
                config.settings.slow_reader_backlog_bytes,
            ),
            metrics=self.metrics,
            readiness=self.readiness,
            gate=self.gate,
            classes=classes,
            settings=config.settings,
            clock=self._clock,
            wall_s=time.time,
            started_s=int(time.time()),
            scrape=self._scrape,
            tracing=self._tracing,
        )
        self._page = self._build_page(incarnation, retry_policy)
        self._audits = AuditHandlers(
            router=config.router_id,
            table=self.table,
            dispatcher=self.dispatcher,
            clock=self._clock,
            positions=surroundings.positions,
        )
        self._routing = RoutingHandlers(reader, self.dispatcher, retry_policy)
        self._scaling, self.demand = self._build_scaling(surroundings), self._build_demand(surroundings, classes)
        self._figures = TimeSeries(self.metrics, time.time)
        self.live = live_events(self._page, self.table, self._scaling, self._figures)
        self._on_down, self._storage = surroundings.on_down, surroundings.storage
        self._is_part = config.is_part
        self._tls = TlsFiles.of(config.settings.tls_cert, config.settings.tls_key)
        self._grpc = GrpcDoor(self.frontend, is_shared=self._is_part, tls=self._tls)
        self._listeners: list[socket.socket] = []

    async def start(self) -> dict[str, int]:
        """Bind the three ports: {"http", "grpc", "admin"}. StartupError when one is taken."""
        wants = self.config.settings
        await self._load_keys()
        self.gate.check_host(wants.host)
        http = self._listen(wants.host, wants.port, is_shared=self._is_part)
        grpc_wanted = port_after(wants.grpc_port, http, wants.port)
        grpc_port = await self._grpc.start(wants.host, grpc_wanted)
        admin = self._listen("127.0.0.1", port_after(wants.admin_port, grpc_port, grpc_wanted))
        self._ports = {"http": http, "grpc": grpc_port, "admin": admin}
        return self._ports

    def stop(self) -> None:
        """Not ready from now on; `serve` returns when answers are complete or `drain_s` is over."""
        self.readiness.is_draining = True
        self._stopping.set()

    async def serve(self, on_listening: Callable[[], None]) -> None:
        wants = self.config.settings
        app = create_app(self.frontend)
        runner = self._add_storage(app)
        guarded = AuthMiddleware(app, self.gate, self._turned_away)
        parting = ShutdownMiddleware(guarded, self._stopping.is_set, self._turned_away)
        http = HttpServer(parting, self._listeners[0], self._tls)
        admin_app = create_admin_app(
            self._page,
            self.metrics,
            self._lock,
            self._on_down,
            self._audits,
            self.table,
            self._routing,
            self._keyring,
            self._slo,
            self._scaling,
            self.live,
            self._figures,
            ApiRelay(wants.host, lambda: self._ports["http"], self._tls, wants.request_timeout_s),
        )
        admin = HttpServer(admin_app, self._listeners[1])
        async with asyncio.TaskGroup() as group:
            servers = [group.create_task(server.run()) for server in (http, admin)]
            tasks = [
                group.create_task(self.table.run(self._make_link)),
                group.create_task(self._keyring.follow()),
                group.create_task(self._budgets.run()),
                group.create_task(self.dispatcher.run()),
                group.create_task(self._watch.run()),
                group.create_task(self._carrying.run()),
                group.create_task(self._figures.run()),
                group.create_task(self._grpc.run()),
            ]
            if self._storage is not None:
                tasks.append(group.create_task(self._storage.memory.run()))
            async with asyncio.timeout(10.0):
                await http.wait_started()
                await admin.wait_started()
            on_listening()
            probing = group.create_task(self.readiness.run(self.dispatcher))
            batches = [group.create_task(runner.run())] if runner is not None else []
            await self._stopping.wait()
            for task in (*batches, probing):
                task.cancel()  # first of all: another router goes on with batches at once, and nothing waits for probes
            http.end_connections()
            await self._grpc.end_health()
            busy = (lambda: http.busy - parting.refusing, lambda: self._grpc.busy)
            await Drain(self.dispatcher, self.admission, busy, self._clock).run(wants.drain_s)
            await http.finish_requests()
            parting.stop_reading_bodies()
            self.live.end()
            for server in (http, admin):
                server.stop()
            await self._grpc.stop(grace_s=0.5)
            await asyncio.wait(servers, timeout=5.0)
            for task in (*tasks, *servers):
                task.cancel()
        if self._tracing is not None:
            await self._tracing.close()

    async def close(self) -> None:
        """Give back what `start` took, if `serve` never ran."""
        for listener in self._listeners:
            listener.close()
        await self._grpc.stop(grace_s=0.0)

    def _add_storage(self, app: FastAPI) -> BatchRunner | None:
        """Add the routes of clients' stored data, and return the runner of their batches."""
        if self._storage is None:
            return None
        self._storage.add_routes(app, self.frontend)
        memory = self._storage.memory
        self.frontend.metrics.watch_redis(lambda: memory.last)
        return self._storage.runner(
            app,
            self.frontend,
            self._clock,
            lambda: (
                self.admission.waiting
                + concurrency.waiting(self.dispatcher.flights, self.table.links, self._clock.now_s())
            ),
        )

    async def _load_keys(self) -> None:
        try:
            await self._keyring.load()
        except UnavailableError as error:
            raise StartupError("cannot read the API keys", why=error.message, todo="start it again") from error

    async def _scrape(self) -> bytes:
        return await whole_scrape(self.config.parent_admin) if self._is_part else self.metrics.render()

    def _turned_away(self, error: TandemError) -> None:
        self.metrics.request_ended("any", error.code)

    def _listen(self, host: str, port: int, *, is_shared: bool = False) -> int:
        listener = bind(host, port, is_shared=is_shared)
        self._listeners.append(listener)
        return port_of(listener)

    def _make_link(self, where: Any) -> WorkerLink:
        return WorkerLink(where, self._identity, self.dispatcher, self._clock)

    def _build_demand(self, around: Dependencies, classes: SloClasses) -> DemandReporter:
        return DemandReporter(
            dispatcher=self.dispatcher,
            table=self.table,
            classes=classes,
            clock=self._clock,
            unique_blocks=around.unique_blocks,
            window_s=self.config.planner.window_s,
        )

    def _build_watch(self, around: Dependencies) -> ClusterWatch:
        links, price = (lambda: self.table.links), self.config.price
        watch = ClusterWatch(
            links, self._clock, price, events=around.events, desired=around.desired, planning=around.planning
        )
        self.metrics.add(watch)
        return watch

    def _build_carrying(self, prefixes: PrefixFinder, around: Dependencies) -> PrefixMigration:
        carrying = PrefixMigration(self.dispatcher, self.table, prefixes, self._clock, around.events, time.time)
        self.dispatcher.on_state_change = carrying.on_state
        return carrying

    def _build_scaling(self, around: Dependencies) -> ScalingHandlers:
        loads = functools.partial(loads_of, self.table, around.unique_blocks)
        mode = self.config.planner.mode
        return ScalingHandlers(
            store=around.desired,
            events=around.events,
            loads=loads,
            planning=around.planning,
            planner_mode=mode,
            has_rollouts=self.config.has_rollouts,
        )

    def _build_page(self, incarnation: Incarnation, retry_policy: RetryPolicy) -> StatusPage:
        return StatusPage(
            config=self.config,
            incarnation=incarnation,
            table=self.table,
            dispatcher=self.dispatcher,
            breakers=retry_policy.breakers,
            readiness=self.readiness,
            clock=self._clock,
            addresses=lambda: {**self._ports, "host": self.config.settings.host, "pid": os.getpid()},
            policy=lambda: retry_policy.policy.name.value,
            admission=lambda: view(self.admission, self.metrics.refusals, self._clock.now_s()),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 after a clean stop, 2 when the router could not start: one line on stderr gives the reason."""
    parser = argparse.ArgumentParser(prog="python -m tandem.router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="RouterConfig as JSON")
    path: Path = parser.parse_args(arguments).config
    try:
        config = load(path, RouterConfig)
        logs.setup("router", level=config.log_level, as_json=config.log_format == logs.JSON)
        is_parent = config.settings.processes != 1 and not config.is_part
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return_large_buffers()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_processes(config) if is_parent else _run(config))
    except StartupError as error:
        sys.stderr.write(f"tandem router: {error.message}\n")
        return EXIT_STARTUP


async def _run(config: RouterConfig) -> int:
    redis = await connect(config.redis_url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        keys = Keys(config.cluster)
        replica = IndexReplica(redis, keys, max_bytes=config.settings.index_memory_bytes)
        store = DesiredStateStore(redis, keys)
        incarnation = new_incarnation()
        speculation = SharedSpeculation(redis, keys, MonotonicClock(), incarnation)
        planning = PlanningStore(redis, keys)
        surroundings = Dependencies(
            directory=RedisDirectory(redis, keys, replica),
            index=replica,
            on_down=lambda: ask_to_stop(store),
            keys=ApiKeyStore(redis, keys),
            positions=lambda: replica.positions,
            storage=open_storage(redis, keys, config.store),
            budgets=BudgetStore(redis, keys),
            desired=store,
            events=ClusterEventStore(redis, keys),
            planning=planning,
            unique_blocks=replica.unique_blocks,
            speculation=speculation,
        )
        links = LinkSpeedStore(redis, keys)
        router = Router(config, surroundings, incarnation)
        router.metrics.add(IndexCollector(replica))
        stack.push_async_callback(router.close)
        ports = await router.start()
        on_signal(router.stop, second_ends=not config.is_part)
        record = RouterRecord(
            router=RouterId(config.router_id),
            incarnation=incarnation,
            http_address=host_port(config.settings.host, ports["http"]),
            grpc_address=host_port(config.settings.host, ports["grpc"]),
            admin_address=f"127.0.0.1:{ports['admin']}",
            pid=os.getpid(),
        )
        async with asyncio.TaskGroup() as group:
            watch = LoopWatch()
            tasks = [
                group.create_task(run_beside(lambda: hold_lease(config.redis_url, keys, record, watch), "lease")),
                group.create_task(watch.run()),
                group.create_task(replica.run()),
                group.create_task(speculation.run()),
                group.create_task(links.watch(surroundings.speeds.set_rows)),
            ]
            if config.planner.mode is not PlannerMode.OFF:
                telling = router.demand.tell(planning, record.router, config.planner.interval_s)
                tasks.append(group.create_task(telling))
            await router.serve(lambda: announce(router, record))
            for task in tasks:
                task.cancel()
    return 0


def announce(router: Router, record: RouterRecord) -> None:
    """Write the ready file for the launcher: where this router listens, and if it lets in requests without an API
    key."""
    freeze_gc()
    use_huge_pages()
    scheme = "https" if router.config.settings.tls_cert else "http"
    ready = Ready(
        http=f"{scheme}://{record.http_address}",
        grpc=record.grpc_address,
        admin=f"http://{record.admin_address}",
        pid=record.pid,
        is_open=router.gate.is_open,
    )
    write_ready(Path(router.config.ready_file), ready)
