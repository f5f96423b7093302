"""Loopback ranks behind the real gRPC service of a worker: a real router speaks to them, tests look inside."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.core.version import STREAM_VERSION
from tandem.kvtransfer.wire import profile_to_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.auth import SecretInterceptor
from tandem.workerhost.relay import ForRank
from tandem.workerhost.server import WorkerService
from tests.integration.worker.loopback import Loopback, Rank
from tools.waiting import PATIENCE_S, words_of


class RankWorker:
    """One rank's service, for a test router's `workers`. Everything but `deliver` runs on the router's event loop."""

    def __init__(self, rank: Rank, role: str, secret: ClusterSecret) -> None:
        self.rank, self.role, self.secret = rank, role, secret
        self.worker = WorkerId(rank.name)
        self.address = ""
        self.inbound: deque[e.HostToRank] = deque()
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        """Requests that a router has sent and cancelled here, whether the rank took notice or not."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service = WorkerService(self)
        self._server: Any = None

    @property
    def incarnation(self) -> Incarnation:
        return self.rank.incarnation

    @property
    def info(self) -> w.WorkerInfo:
        engine = self.rank.context.engine
        return w.WorkerInfo(
            worker=self.rank.name,
            incarnation=self.rank.incarnation,
            role=self.role,
            address=self.address,
            model="tandem-tiny",
            fingerprint=self.rank.context.fingerprint,
            tp=1,
            block_tokens=engine.layout.groups[0].block_tokens,
            kv_dtype="float32",
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            num_blocks=[ledger.num_blocks for ledger in engine.ledgers],
            transports=self.rank.context.profile.transports,
            protocol=STREAM_VERSION,
            eos_token_ids=engine.eos_token_ids,
            profile=profile_to_wire(self.rank.context.profile),
        )

    def to_rank(self, message: ForRank) -> None:
        heard = e.HostToRank.FromString(message.SerializeToString())
        self.inbound.append(heard)
        said = heard.router.message
        if said.HasField("submit"):
            self.submitted.append(said.submit.request)
        elif said.HasField("cancel"):
            self.cancelled.append(said.cancel.request)

    def acknowledged(self) -> None:
        return

    def deliver(self, message: w.WorkerMessage, router: str) -> None:
        """From the ranks' thread: pass a message on to a router."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._service.to_router, router, message.SerializeToString())

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = grpc.aio.server(
            interceptors=(SecretInterceptor(self.secret, lambda: self.info),),
            options=[*PROOF_OF_LIFE, ("grpc.so_reuseport", 0)],
        )
        self._service.add_to(server)
        port = server.add_insecure_port(self.address or "127.0.0.1:0")
        await server.start()
        self.address, self._server = f"127.0.0.1:{port}", server

    @property
    def is_running(self) -> bool:
        return self._server is not None

    async def stop(self) -> None:
        """Die, as far as the router sees."""
        if self._server is not None:
            self._service.close_all()
            await self._server.stop(0)
            self._server = None


class ServedPair(Loopback):
    """A prefill and a decode rank, turned by a thread of their own, each behind a worker's service."""

    def __init__(self, folder: Path, model: Path, secret: ClusterSecret, **settings: Any) -> None:
        super().__init__(folder, model, **settings)
        self.workers = {
            self.p.name: RankWorker(self.p, "prefill", secret),
            self.d.name: RankWorker(self.d, "decode", secret),
        }
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ranks")

    def call(self, function: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Run something on the step loops' thread, between two turns."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future.result(timeout_s)

    def wait(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until `condition` holds, looked at between turns."""
        held = threading.Event()

        def look() -> None:
            if condition():
                held.set()
            elif not self._is_stopping.is_set():
                self._calls.put((look, Future()))

        self._calls.put((look, Future()))
        assert held.wait(timeout_s), f"{words_of(condition)}: not within {timeout_s:g} s ({self.failure})"

    def carry(self, rank: Rank) -> None:
        for message in rank.sent:
            if message.HasField("router"):
                self.workers[rank.name].deliver(message.router.message, message.router.router)
        super().carry(rank)

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                for _ in range(self._calls.qsize()):
                    self._answer(*self._calls.get())
                for worker in self.workers.values():
                    while worker.inbound:
                        worker.rank.deliver(worker.inbound.popleft())
                self.turn()
        except BaseException as error:  # noqa: BLE001 - shown by the test that waits
            self.failure = error

    @staticmethod
    def _answer(function: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    @contextmanager
    def running(self) -> Iterator[ServedPair]:
        self._thread.start()
        try:
            yield self
        finally:
            self._is_stopping.set()
            self._thread.join(20)
        assert self.failure is None, self.failure
