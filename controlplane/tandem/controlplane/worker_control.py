"""Controls single workers over their own gRPC port: drain, uncordon, become, look. Decides nothing and keeps
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from tandem.core.call_proof import CONTROL, CallProof
from tandem.core.errors import AuthError, InvalidRequestError, NotFoundError, TandemError, UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.lifecycle import RoleName, WorkerState
from tandem.core.secret import ClusterSecret
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import worker_pb2_grpc

TIMEOUT_S: Final = 5.0
"""For one answer; a worker answers within a step, or after a second without its numbers."""
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Addressed(Protocol):
    """Target of an order; a registry record is one. `address`: host:port of its gRPC server."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def address(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """State of a worker. `in_flight`: attempts of requests; `leases`: blocks that are promised to, or read by,
    transfers. `target`: the role that it is about to take. `last_flip_s`: how long its last change of role took without
    the drain, 0 without one; `flip_failure`: why the last order to change it failed, "" if it did not."""

    worker: WorkerId
    incarnation: Incarnation
    role: RoleName
    state: WorkerState
    target: RoleName | None
    in_flight: int
    leases: int
    flips: int
    last_flip_s: float
    flip_failure: str

    @property
    def is_drained(self) -> bool:
        """True if it takes no work and nothing is in flight: it can be stopped without effect on requests."""
        return self.state is WorkerState.DRAINED


class WorkerControl:
    """Every order may be repeated, and is answered at once with the present state: poll `look` for longer effects.

    All raise UnavailableError if the worker does not answer, or as another release would, NotFoundError if another one
    answers at its address, and AuthError for another cluster's secret.
    """

    def __init__(self, secret: ClusterSecret, *, timeout_s: float = TIMEOUT_S) -> None:
        self._secret, self._timeout_s = secret, timeout_s

    async def look(self, worker: Addressed) -> WorkerLook:
        """Return its present state."""
        return await self._order(worker, c.ControlRequest(look=c.LookOrder()))

    async def drain(self, worker: Addressed, deadline_s: float | None = None) -> WorkerLook:
        """Let it take no new work until `uncordon`. Requests that still run there after `deadline_s` are moved to other
        workers, if any can take them; None = they may end there."""
        return await self._order(worker, c.ControlRequest(drain=c.DrainOrder(deadline_s=deadline_s)))

    async def uncordon(self, worker: Addressed) -> WorkerLook:
        """Let it take work again; undoes a change of role that still drains."""
        return await self._order(worker, c.ControlRequest(uncordon=c.UncordonOrder()))

    async def become(self, worker: Addressed, role: RoleName, deadline_s: float | None = None) -> WorkerLook:
        """Let it drain, then go on in another role as another incarnation; it keeps its incarnation if it cannot be
        registered. With the role that it has: undo a change that still drains."""
        order = c.BecomeOrder(role=role.value, deadline_s=deadline_s)
        return await self._order(worker, c.ControlRequest(become=order))

    async def _order(self, worker: Addressed, request: c.ControlRequest) -> WorkerLook:
        request.worker = worker.worker
        try:
            async with grpc.aio.insecure_channel(worker.address, options=_OPTIONS) as channel:
                stub: Any = worker_pb2_grpc.WorkerStub(channel)
                proof = CallProof.of(self._secret, CONTROL, worker.worker)
                call = stub.Control(request, metadata=proof.metadata, timeout=self._timeout_s)
                reply = await call
                if not proof.is_answered(await call.initial_metadata()):
                    why = "the process at that address did not prove that it knows the secret"
                    what = f"the answer of worker {worker.worker} at {worker.address} is not believed"
                    raise AuthError(what, why=why, todo="look at which process listens there")
        except grpc.aio.AioRpcError as error:
            raise _explained(worker, error) from error
        try:
            return _look(reply)
        except ValueError as error:
            what = f"the answer of worker {worker.worker} at {worker.address} is not understood"
            todo = "run one release of Tandem everywhere, or wait until all are"
            raise UnavailableError(what, why=str(error), todo=todo) from error


def _look(reply: c.ControlReply) -> WorkerLook:
    return WorkerLook(
        worker=WorkerId(reply.worker),
        incarnation=Incarnation(reply.incarnation),
        role=RoleName(reply.role),
        state=WorkerState(reply.state),
        target=RoleName(reply.target_role) if reply.target_role else None,
        in_flight=reply.in_flight,
        leases=reply.leases,
        flips=reply.flips,
        last_flip_s=reply.last_flip_s,
        flip_failure=reply.flip_failure,
    )


def _explained(worker: Addressed, error: grpc.aio.AioRpcError) -> TandemError:
    what, why, code = f"worker {worker.worker} at {worker.address} was not reached", str(error.details()), error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthError(f"worker {worker.worker} refuses the order", why=why, todo="use the secret of its cluster")
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(what, why=why, todo="look up where it is now")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(f"worker {worker.worker} refuses the order", why=why)
    return UnavailableError(what, why=f"{code.name}: {why}", todo="look at its log, or wait until it is back")
