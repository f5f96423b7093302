"""The host process of a worker: rank processes, gRPC server, peers, registration. It computes nothing itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.config import WorkerConfig
from tandem.core.errors import StartupError, WorkerLostError
from tandem.core.ids import GroupId
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.core.start_times import StartPhase, StartTimes
from tandem.core.state_enums import RoleName, WorkerState
from tandem.kvtransfer.host_id import host_id
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w
from tandem.statestore.stores.link_speeds import LinkSpeedStore
from tandem.workerhost.auth import MAX_CALLS, SecretInterceptor
from tandem.workerhost.lifecycle import WorkerLifecycle
from tandem.workerhost.link_speed_sync import LinkShare
from tandem.workerhost.membership import Membership
from tandem.workerhost.peer_channels import PeerChannels
from tandem.workerhost.rank_group import START_AGAIN, RankGroup
from tandem.workerhost.relay import ForRank
from tandem.workerhost.server import WorkerService
from tandem.workerhost.watchdog import LOADING_LOOKS, WATCH_EVERY_S, RankWatch, Watchdog

_log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 5.0
SERVER_GRACE_S = 0.5
SERVER_OPTIONS = (
    *PROOF_OF_LIFE,
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.so_reuseport", 0),
)
_PHASES = frozenset(StartPhase)
READY, LIVE = "", "live"
"""Services of health checks: the worker takes work, and its process serves at all."""


class WorkerHost:
    """One worker. `run` returns the exit status when the worker was stopped; raises when it cannot go on."""

    def __init__(
        self,
        config: WorkerConfig,
        config_file: Path,
        on_progress: Callable[[str], None],
        times: StartTimes | None = None,
    ) -> None:
        """`times`: of the start so far."""
        self._config = config
        self._times = times or StartTimes(StartPhase.CONFIG)
        self._secret = ClusterSecret.load(Path(config.secret_file))
        self._on_progress = on_progress
        self._ranks = RankGroup(config, config_file, self._from_rank)
        self._service = WorkerService(self)
        self._membership = Membership(config, self._lease_granted, self._new_incarnation)
        self._steering = WorkerLifecycle(self, MonotonicClock())
        self._links = LinkShare(host_id(), self.to_rank)
        self._watchdog = Watchdog(self._ranks, config.settings, self._stall)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._peers: PeerChannels | None = None
        self._ready: asyncio.Future[e.RankReady] | None = None
        self._info = w.WorkerInfo()
        self._stop = asyncio.Event()
        self._is_hung_up = False

    @property
    def info(self) -> w.WorkerInfo:
        return self._info

    def to_rank(self, message: ForRank) -> None:
        self._ranks.send(message)

    def acknowledged(self) -> None:
        self._membership.acknowledged()

    def stop(self) -> None:
        """Ask `run` to end; safe to call from a signal handler of the event loop."""
        self._stop.set()

    async def run(self, on_ready: Callable[[w.WorkerInfo], None]) -> None:
        """Start everything, serve until `stop`, and stop everything again."""
        self._ready = asyncio.get_running_loop().create_future()
        self._times.enter(StartPhase.RANKS)
        await self._ranks.start()
        server = grpc.aio.server(
            interceptors=(SecretInterceptor(self._secret, lambda: self._info),), options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )  # fmt: skip
        try:
            async with asyncio.TaskGroup() as tasks:
                death = tasks.create_task(self._watch_death())
                life = tasks.create_task(self._live(tasks, server, on_ready))
                try:
                    await self._stop.wait()
                    for task in (death, life):
                        task.cancel()
                    await self._membership.leave()
                finally:  # before the group waits for its tasks: a channel that is dialled now would never end
                    self._hang_up()
                await server.stop(SERVER_GRACE_S)
                is_serving = self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None
                await self._ranks.stop(STOP_TIMEOUT_S if is_serving else 0.0)
        finally:
            self._ranks.kill()
            await server.stop(None)
            await self._ranks.wait()
            self._ranks.close()
            await self._membership.close()

    def _hang_up(self) -> None:
        self._is_hung_up = True
        self._service.close_all()
        if self._peers is not None:
            self._peers.close()

    async def _live(
        self, tasks: asyncio.TaskGroup, server: grpc.aio.Server, on_ready: Callable[[w.WorkerInfo], None]
    ) -> None:
        """Start, then watch and beat until cancelled (at any point)."""
        async with asyncio.TaskGroup() as loading:
            watch = loading.create_task(self._watch_loading())
            self._info.CopyFrom(await self._start(tasks, server))
            watch.cancel()
        self._on_progress(self._times.words())
        event(_log, "worker started", logging.INFO, **self._times.fields())
        on_ready(self._info)
        async with asyncio.TaskGroup() as alive:
            alive.create_task(self._watchdog.run())
            alive.create_task(self._membership.run())
            alive.create_task(self._steering.run())
            alive.create_task(self._links.run(LinkSpeedStore(self._membership.redis, self._membership.keys)))

    async def _start(self, tasks: asyncio.TaskGroup, server: grpc.aio.Server) -> w.WorkerInfo:
        """Rank first, then the port, then the registration: a registered worker can be used at once."""
        assert self._ready is not None
        ready = await self._ready
        self._peers = PeerChannels(self, self._secret, tasks)
        self._service.add_to(server)
        server.add_generic_rpc_handlers((self._steering.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for asked in (READY, LIVE):
            await self._health.set(asked, health_pb2.HealthCheckResponse.SERVING)
        try:
            port = server.add_insecure_port(f"{self._config.host}:{self._config.port}")
        except RuntimeError as error:
            raise StartupError(
                f"port {self._config.port} cannot be opened", why=str(error), todo="choose another port"
            ) from error
        await server.start()
        info = w.WorkerInfo()
        info.CopyFrom(ready.info)
        info.address = f"{self._config.host}:{port}"
        info.rank_pids.extend(self._ranks.pids)
        self._progress(StartPhase.REGISTRATION)
        info.incarnation = await self._membership.join(info)
        self.to_rank(e.HostToRank(incarnation=e.NewIncarnation(incarnation=info.incarnation)))
        return info

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def _from_rank(self, rank: int, message: p.FromRank) -> None:
        """Handle messages of ranks: rank 0 sends all kinds, the others only why they cannot go on."""
        kind = message.WhichOneof("kind")
        if kind == "router":
            self._service.to_router(message.router.router, message.router.message, may_wait=message.router.may_wait)
        elif kind == "peer":
            self._to_peer(message.peer)
        elif kind == "load":
            for key, count in (*self._membership.counters().items(), *self._watchdog.counters().items()):
                message.load.counters[key] = count
            self._service.broadcast_load(message.load)
        elif kind == "events":
            stored = [(GroupId(b.group), BlockHash(b.hash), b.is_removed) for b in message.events.events]
            self._membership.publish(stored)
        elif kind == "link_measured":
            self._links.measured(message.link_measured)
        elif kind == "looked":
            self._steering.looked(message.looked)
        elif kind == "progress":
            self._progress(message.progress.text)
        elif kind == "ready":
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message.ready)
        elif kind == "fatal":
            is_cause = message.fatal.code != WorkerLostError.code  # else another rank was lost first
            if self._ready is not None and not self._ready.done() and is_cause:
                self._ready.set_exception(StartupError(message.fatal.message))
            self._ranks.note_fatal(rank, message.fatal)

    def _progress(self, text: str) -> None:
        if text in _PHASES:
            self._times.enter(StartPhase(text))
        self._on_progress(text)

    def _to_peer(self, to: p.PassedToPeer) -> None:
        if not to.address and self._service.answer_peer(to.worker, to.message):
            return
        is_sent = self._peers is not None and self._peers.send(to)
        if not is_sent and not self._is_hung_up:
            reason = "there is no control channel to it"
            self.to_rank(
                e.HostToRank(peer_gone=e.PeerGone(worker=to.worker, incarnation=to.incarnation, reason=reason))
            )

    async def _watch_death(self) -> None:
        try:
            await self._ranks.wait_loss()
        except WorkerLostError as error:
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(error)
            elif self._ready is not None and self._ready.exception() is not None:
                return  # it never started, and has reported why
            raise

    async def _watch_loading(self) -> None:
        """End the worker, too, if a rank stops or hangs before it is ready."""
        watch = RankWatch(self._ranks.pulses, LOADING_LOOKS)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if silent := watch.look():
                why = f"it has sent no heartbeat for {LOADING_LOOKS * WATCH_EVERY_S:g} s"
                raise WorkerLostError(f"rank {silent[0]} hangs while it loads", why=why, todo=START_AGAIN)

    async def _stall(self, is_stalled: bool) -> None:
        """Report that a step does not end, or has ended after all, to health checks and to routers."""
        serving = health_pb2.HealthCheckResponse
        await self._health.set(READY, serving.NOT_SERVING if is_stalled else serving.SERVING)
        self._steering.stall(is_stalled)

    # ---- lease -----------------------------------------------------------------------------------------------------

    def _lease_granted(self, until_s: float) -> None:
        self._ranks.grant(until_s, self._membership.incarnation)

    def _new_incarnation(self, incarnation: int) -> None:
        """Pass the new incarnation on after a lapse of the lease."""
        event(_log, "registered again", logging.WARNING, incarnation=incarnation)
        self._begin(e.NewIncarnation(incarnation=incarnation))

    def _begin(self, begun: e.NewIncarnation) -> None:
        """End all streams: routers and peers must connect to the new incarnation."""
        self._info.incarnation = begun.incarnation
        self._service.close_all()
        if self._peers is not None:
            self._peers.drop_all()
        self.to_rank(e.HostToRank(incarnation=begun))

    # ---- steering --------------------------------------------------------------------------------------------------

    def broadcast_state(self, state: w.WorkerState) -> None:
        self._info.state = state.state
        self._service.broadcast_state(state)

    @property
    def is_state_heard(self) -> bool:
        return self._service.is_state_heard

    async def record_state(self, state: WorkerState) -> None:
        await self._membership.say_state(state)

    async def take_role(self, role: RoleName) -> None:
        """The rank's role follows in the message that makes it another incarnation: none sees it in between."""
        incarnation = await self._membership.take_role(role)
        self._info.role, self._info.state = role.value, WorkerState.READY.value
        self._begin(e.NewIncarnation(incarnation=incarnation, role=role.value))
