"""The host process of a worker: rank processes, gRPC server, peers, registration. It computes nothing itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.core.blockhash import BlockHash
from tandem.core.config import WorkerConfig
from tandem.core.errors import StartupError, WorkerLostError
from tandem.core.ids import GroupId
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.auth import SecretInterceptor
from tandem.workerhost.membership import Membership
from tandem.workerhost.peers import PeerChannels
from tandem.workerhost.rank_process import RankProcess
from tandem.workerhost.server import WorkerService

_log = logging.getLogger(__name__)
STOP_TIMEOUT_S = 5.0
SERVER_GRACE_S = 0.5
WATCH_EVERY_S = 0.25
RANK_SILENCE_S = 2.5
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.so_reuseport", 0),
)


class WorkerHost:
    """One worker. `run` returns the exit status when the worker was asked to stop; raises when it cannot go on."""

    def __init__(self, config: WorkerConfig, config_file: Path, on_progress: Callable[[str], None]) -> None:
        self._config = config
        self._secret = ClusterSecret.load(Path(config.secret_file))
        self._on_progress = on_progress
        self._rank = RankProcess(0, "tandem.worker.rank", config_file, self._from_rank)
        self._service = WorkerService(self)
        self._membership = Membership(config, self._lease_granted, self._new_incarnation)
        self._peers: PeerChannels | None = None
        self._ready: asyncio.Future[e.RankReady] | None = None
        self._info = w.WorkerInfo()
        self._stop = asyncio.Event()

    @property
    def info(self) -> w.WorkerInfo:
        return self._info

    def to_rank(self, message: e.HostToRank) -> None:
        self._rank.send(message)

    def acknowledged(self) -> None:
        self._membership.acknowledged()

    def stop(self) -> None:
        """Ask `run` to end; safe to call from a signal handler of the event loop."""
        self._stop.set()

    async def run(self, on_ready: Callable[[w.WorkerInfo], None]) -> None:
        """Start everything, serve until `stop`, and take everything down again."""
        self._ready = asyncio.get_running_loop().create_future()
        await self._rank.start()
        server = grpc.aio.server(interceptors=(SecretInterceptor(self._secret),), options=SERVER_OPTIONS)
        try:
            async with asyncio.TaskGroup() as tasks:
                death = tasks.create_task(self._watch_death())
                life = tasks.create_task(self._live(tasks, server, on_ready))
                await self._stop.wait()
                for task in (death, life):
                    task.cancel()
                await self._membership.leave()
                self._service.close_all()
                if self._peers is not None:
                    self._peers.close_all()
                await server.stop(SERVER_GRACE_S)
                is_serving = self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None
                await self._rank.stop(STOP_TIMEOUT_S if is_serving else 0.0)
        finally:
            self._rank.kill()
            await server.stop(None)
            await self._rank.wait()
            self._rank.close()
            await self._membership.close()

    async def _live(
        self, tasks: asyncio.TaskGroup, server: grpc.aio.Server, on_ready: Callable[[w.WorkerInfo], None]
    ) -> None:
        """Start, then watch and beat until cancelled (at any point)."""
        self._info.CopyFrom(await self._start(tasks, server))
        on_ready(self._info)
        async with asyncio.TaskGroup() as alive:
            alive.create_task(self._watch_pulse())
            alive.create_task(self._membership.run())

    async def _start(self, tasks: asyncio.TaskGroup, server: grpc.aio.Server) -> w.WorkerInfo:
        """Rank first, then the port, then the registration: whoever finds the worker can use it at once."""
        assert self._ready is not None
        ready = await self._ready
        self._peers = PeerChannels(self, self._secret, tasks)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, server)
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
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
        info.rank_pids.append(self._rank.pid)
        self._on_progress("registering")
        info.incarnation = await self._membership.join(info)
        self.to_rank(e.HostToRank(incarnation=e.NewIncarnation(incarnation=info.incarnation)))
        return info

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _from_rank(self, message: e.RankToHost) -> None:
        kind = message.WhichOneof("kind")
        if kind == "router":
            self._service.to_router(message.router.router, message.router.message)
        elif kind == "peer":
            self._to_peer(message.peer)
        elif kind == "load":
            self._service.broadcast_load(message.load)
        elif kind == "events":
            stored = [(GroupId(b.group), BlockHash(b.hash), b.is_removed) for b in message.events.events]
            self._membership.publish(stored)
        elif kind == "progress":
            self._on_progress(message.progress.text)
        elif self._ready is not None and not self._ready.done():
            if kind == "ready":
                self._ready.set_result(message.ready)
            elif kind == "fatal":
                self._ready.set_exception(StartupError(message.fatal.message))

    def _to_peer(self, to: e.ToPeer) -> None:
        if not to.address and self._service.answer_peer(to.worker, to.message):
            return
        if self._peers is None or not self._peers.send(to):
            reason = "there is no control channel to it"
            self.to_rank(
                e.HostToRank(peer_gone=e.PeerGone(worker=to.worker, incarnation=to.incarnation, reason=reason))
            )

    async def _watch_death(self) -> None:
        status = await self._rank.wait()
        if self._ready is not None and self._ready.done() and self._ready.exception() is not None:
            return
        error = WorkerLostError(f"rank 0 ended with status {status}", why="see its log", todo="it is started again")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        raise error

    async def _watch_pulse(self) -> None:
        """Beat only while the rank ticks; a step past its limit is a stuck engine, and the worker ends."""
        limit_s = self._config.settings.step_watchdog_s
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now_s, pulse = time.monotonic(), self._rank.pulse
            silence_s = now_s - pulse.ticked_s
            in_step_s = now_s - pulse.step_started_s if pulse.step_started_s else 0.0
            self._membership.is_alive = silence_s < RANK_SILENCE_S and in_step_s < limit_s
            if in_step_s > limit_s:
                raise WorkerLostError(f"a step has been running for {in_step_s:.0f} s", todo="it is started again")

    # ---- lease -----------------------------------------------------------------------------------------------------

    def _lease_granted(self, until_s: float) -> None:
        self._rank.pulse.grant(until_s)

    def _new_incarnation(self, incarnation: int) -> None:
        """The lease had lapsed: routers and peers must meet the worker anew."""
        event(_log, "registered anew", logging.WARNING, incarnation=incarnation)
        self._info.incarnation = incarnation
        self._service.close_all()
        if self._peers is not None:
            self._peers.close_all()
        self.to_rank(e.HostToRank(incarnation=e.NewIncarnation(incarnation=incarnation)))
