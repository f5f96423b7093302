"""The service of a worker without the worker, and peers of other versions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from tandem.core.call_proof import PEER, STREAM, CallProof, stream_target
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.auth import SecretInterceptor
from tandem.workerhost.relay import ForRank
from tandem.workerhost.server import WorkerService
from tools.made_up_worker import let_in

SECRET = ClusterSecret(b"0123456789abcdef0123456789abcdef")
NOVELTY = b"\xfa\x3e\x03new"
"""Field 999, as some later minor version may add it."""


class Backend:
    """Stands for the worker around the service; keeps what would go to rank 0."""

    def __init__(self, name: str = "d0", incarnation: int = 77) -> None:
        self.info = w.WorkerInfo(worker=name, incarnation=incarnation)
        self.got: asyncio.Queue[e.HostToRank] = asyncio.Queue()
        self.acknowledgements = 0

    def to_rank(self, message: ForRank) -> None:
        self.got.put_nowait(e.HostToRank.FromString(message.SerializeToString()))

    def acknowledged(self) -> None:
        self.acknowledgements += 1


def proof(method: str = STREAM, secret: ClusterSecret = SECRET, target: str = stream_target("d0", 77)) -> Any:
    """Metadata of one call to d0."""
    return CallProof.of(secret, method, target).metadata


@asynccontextmanager
async def serving(backend: Backend) -> AsyncIterator[tuple[WorkerService, str]]:
    service = WorkerService(backend)
    interceptor = SecretInterceptor(SECRET, lambda: backend.info)
    server = grpc.aio.server(interceptors=(interceptor,), options=PROOF_OF_LIFE)
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        service.close_all()
        await server.stop(0.1)


def for_peer(message: w.PeerMessage, address: str, incarnation: int = 77) -> p.PassedToPeer:
    """Return rank 0's message to d0, in the host's form."""
    to = e.ToPeer(worker="d0", incarnation=incarnation, address=address, message=message)
    return p.PassedToPeer.FromString(to.SerializeToString())


def hello(major: int, minor: int, peer_incarnation: int = 77) -> w.PeerMessage:
    """The hello of a worker that has a field more than we know."""
    said = w.PeerHello(
        worker="p0", incarnation=5, peer_incarnation=peer_incarnation, protocol=major, protocol_minor=minor
    )
    return w.PeerMessage.FromString(w.PeerMessage(hello=said).SerializeToString() + NOVELTY)


class Stranger(worker_pb2_grpc.WorkerServicer):
    """A worker that answers every control channel with the same version."""

    async def Stream(self, requests: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no routers here")
        yield w.WorkerMessage()

    async def Control(self, request: Any, context: Any) -> c.ControlReply:  # noqa: N802
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "nobody steers it")
        return c.ControlReply()

    def __init__(self, major: int, minor: int, secret: ClusterSecret = SECRET) -> None:
        self._answer, self._secret = hello(major, minor), secret

    async def Peer(self, requests: AsyncIterator[w.PeerMessage], context: Any) -> Any:  # noqa: N802
        await let_in(context, self._secret, PEER)
        await anext(requests)
        yield self._answer
        async for message in requests:
            if message.HasField("ticket_request"):
                yield w.PeerMessage(ticket=w.Ticket(request=message.ticket_request.request))
