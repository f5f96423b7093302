"""The worker's gRPC service: streams of routers and control channels of peers, each pumped to and from rank 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc
import grpc.aio

from tandem.core.errors import RequestTooLargeError, TandemError
from tandem.core.logs import event
from tandem.core.version import release, stream_refusal
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.relay import ForRank, InboundMessage, from_peer, from_router, handlers, joined
from tandem.workerhost.stream_protocol import CLOSED, HELLO_TIMEOUT_S, OutQueue, hello_refusal, peer_hello, run_stream

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """Interface of the worker for the service: its identity, and rank 0."""

    @property
    def info(self) -> w.WorkerInfo: ...

    def to_rank(self, message: ForRank) -> None: ...

    def acknowledged(self) -> None:
        """A router showed that it knows this incarnation: the lease may be renewed."""


class WorkerService:
    """Holds one outgoing queue for every router and for every peer that dialled in."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._routers: dict[str, OutQueue] = {}
        self._peers: dict[str, OutQueue] = {}
        self._last_load = w.WorkerMessage(load=w.LoadReport()).SerializeToString()
        self._state_sequence = 0
        self._heard: dict[str, int] = {}  # state acknowledged by each router

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register both methods at a server."""
        server.add_generic_rpc_handlers((handlers(self.Stream, self.Peer),))

    def to_router(self, router: str, message: bytes, *, may_wait: bool = False) -> None:
        """Send a WorkerMessage to a router, if it is connected; its requests end when it is not, so nothing is kept for
        it."""
        queue = self._routers.get(router)
        if queue is not None:
            queue.put(message, may_wait=may_wait)

    def broadcast_load(self, load: w.LoadReport) -> None:
        """Send a new load report to every router."""
        self._last_load = w.WorkerMessage(load=load).SerializeToString()
        for queue in self._routers.values():
            queue.put(self._last_load, may_wait=True)

    def broadcast_state(self, state: w.WorkerState) -> None:
        """Send every router, which must acknowledge it, the state: if this worker takes work."""
        self._state_sequence = state.sequence
        data = w.WorkerMessage(state=state).SerializeToString()
        for queue in self._routers.values():
            queue.put(data)

    @property
    def is_state_heard(self) -> bool:
        """True if every connected router has acknowledged it: its earlier messages are at rank 0."""
        return all(self._heard.get(router, 0) >= self._state_sequence for router in self._routers)

    def answer_peer(self, worker: str, message: bytes) -> bool:
        """Answer on the channel that this peer opened; False if it has none."""
        queue = self._peers.get(worker)
        return queue is not None and queue.put(message)

    def close_all(self) -> None:
        """End every stream (the worker stops, or registers anew)."""
        for router in list(self._routers.values()):
            router.close()
        for peer in list(self._peers.values()):
            peer.close()

    async def Stream(self, requests: AsyncIterator[InboundMessage[w.RouterMessage]], context: Any) -> None:  # noqa: N802
        first = (await _hello(requests, context)).message
        if not first.HasField("hello") or not first.hello.router:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello with an id")
        info = self._backend.info
        why = stream_refusal(first.hello.protocol)
        if not why and (first.hello.worker_incarnation != info.incarnation or not info.incarnation):
            why = f"this worker is now {info.incarnation}"
        if why:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        router = first.hello.router
        queue = OutQueue(router)
        if self._replace(self._routers, router, queue):  # the older stream's requests are over
            self._backend.to_rank(e.HostToRank(router_gone=e.RouterGone(router=router)))
        queue.put(self._last_load)
        self._heard[router] = self._state_sequence  # the hello carries it

        def handle(heard: InboundMessage[w.RouterMessage]) -> None:
            if self._routers.get(router) is not queue:  # superseded: its requests are over
                return
            if heard.message.HasField("ping"):
                self._backend.acknowledged()
                queue.put(w.WorkerMessage(pong=heard.message.ping).SerializeToString(), may_wait=True)
                return
            if heard.message.HasField("state_heard"):
                self._heard[router] = heard.message.state_heard.sequence
                return
            try:
                self._backend.to_rank(from_router(router, heard.data))
            except RequestTooLargeError as error:
                queue.put(_refused(heard.message.submit, error).SerializeToString())

        def handle_all(heard: InboundMessage[w.RouterMessage]) -> None:
            if not heard.message.HasField("batch"):
                handle(heard)
            for one in heard.message.batch.messages:
                handle(InboundMessage(one, one.SerializeToString()))

        event(_log, "router connected", router=router)
        why = CLOSED
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = w.WorkerHello(info=info, version=release(), wall_s=time.time())
                await context.write(w.WorkerMessage(hello=hello).SerializeToString())
            why = await run_stream(requests, handle_all, queue, context, joined)
        except TimeoutError:
            why = f"it did not read a hello within {HELLO_TIMEOUT_S:g} s"
        finally:
            if self._routers.get(router) is queue:
                del self._routers[router]
                self._heard.pop(router, None)
                self._backend.to_rank(e.HostToRank(router_gone=e.RouterGone(router=router)))
                event(_log, "router gone", router=router, reason=why)

    async def Peer(self, requests: AsyncIterator[InboundMessage[w.PeerMessage]], context: Any) -> None:  # noqa: N802
        first = (await _hello(requests, context)).message
        info = self._backend.info
        hello = first.hello
        if not first.HasField("hello") or not hello.worker:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello with an id")
        why = hello_refusal(hello)
        if hello.peer_incarnation != info.incarnation:
            why = f"this worker is {info.incarnation} now"
        if why:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)
        peer = hello.worker
        queue = OutQueue(peer)
        if self._replace(self._peers, peer, queue):  # its transfers went with the older channel
            gone = e.PeerGone(worker=peer, reason="it opened another control channel")
            self._backend.to_rank(e.HostToRank(peer_gone=gone))
        queue.put(w.PeerMessage(hello=peer_hello(info, hello.incarnation)).SerializeToString())

        def handle(heard: InboundMessage[w.PeerMessage]) -> None:
            if heard.message.HasField("ping"):
                queue.put(w.PeerMessage(ping=heard.message.ping).SerializeToString())
            elif self._peers.get(peer) is queue:
                self._backend.to_rank(from_peer(peer, hello.incarnation, heard.data))

        why = CLOSED
        try:
            why = await run_stream(requests, handle, queue, context)
        finally:
            if self._peers.get(peer) is queue:
                del self._peers[peer]
                gone = e.PeerGone(worker=peer, incarnation=hello.incarnation, reason=why)
                self._backend.to_rank(e.HostToRank(peer_gone=gone))

    @staticmethod
    def _replace(queues: dict[str, OutQueue], name: str, queue: OutQueue) -> bool:
        """Replace the older stream of the same peer by a newer one; True if there was one."""
        older = queues.get(name)
        queues[name] = queue
        if older is not None:
            older.close()
        return older is not None


def _refused(submit: w.Submit, error: TandemError) -> w.WorkerMessage:
    failed = w.RequestFailed(request=submit.request, attempt=submit.attempt, code=error.code, message=error.message)
    return w.WorkerMessage(failed=failed)


async def _hello(requests: AsyncIterator[Any], context: Any) -> Any:
    try:
        return await asyncio.wait_for(anext(requests), HELLO_TIMEOUT_S)
    except (StopAsyncIteration, TimeoutError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello was received")
        raise AssertionError("abort raises") from None
