"""Controls workers over their own gRPC port: drain, uncordon, become, look. Decides nothing and keeps nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from tandem.core.call_proof import CONTROL, CallProof
from tandem.core.errors import AuthError, InvalidRequestError, NotFoundError, TandemError, UnavailableError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.proto_mapping import from_proto
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import worker_pb2_grpc

TIMEOUT_S: Final = 5.0
"""For one answer; a worker answers within a step, or after a second without its numbers."""
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """State of a worker. `in_flight`: attempts of requests; `leases`: blocks that are promised to, or read by,
    transfers. `target`: the role that it is about to take. `last_flip_s`: how long its last change of role took without
    the drain, 0 without one; `flip_failure`: why the last order to change it failed, "" if it did not."""

    worker: WorkerId
    role: RoleName
    state: WorkerState
    incarnation: Incarnation
    target: RoleName | None = None
    in_flight: int = 0
    leases: int = 0
    flips: int = 0
    last_flip_s: float = 0.0
    flip_failure: str = ""

    @property
    def is_drained(self) -> bool:
        """True if it takes no work and nothing is in flight: it can be stopped without effect on requests."""
        return self.state is WorkerState.DRAINED


class WorkerControlClient:
    """Every order is idempotent, and is answered at once with the present state: poll `look` for longer effects.

    `address_of`: the host:port of a worker's gRPC server; its errors are passed on. All orders raise UnavailableError
    if the worker does not answer, or as another release would, NotFoundError if another one answers at its address, and
    AuthError for another cluster's secret.
    """

    def __init__(
        self, secret: ClusterSecret, address_of: Callable[[WorkerId], str], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._secret, self._address_of, self._timeout_s = secret, address_of, timeout_s

    async def look(self, worker: WorkerId) -> WorkerLook:
        """Return its present state."""
        return await self._order(worker, c.ControlRequest(look=c.LookOrder()))

    async def drain(self, worker: WorkerId, deadline_s: float | None = None) -> WorkerLook:
        """Let it take no new work until `uncordon`. Requests that still run there after `deadline_s` are moved to other
        workers, if any can take them; None = they may end there."""
        return await self._order(worker, c.ControlRequest(drain=c.DrainOrder(deadline_s=deadline_s)))

    async def uncordon(self, worker: WorkerId) -> WorkerLook:
        """Let it take work again; undoes a change of role that still drains."""
        return await self._order(worker, c.ControlRequest(uncordon=c.UncordonOrder()))

    async def become(self, worker: WorkerId, role: RoleName, deadline_s: float | None = None) -> WorkerLook:
        """Let it drain, then go on in another role as another incarnation; it keeps its incarnation if it cannot be
        registered. With the role that it has: undo a change that still drains."""
        order = c.BecomeOrder(role=role.value, deadline_s=deadline_s)
        return await self._order(worker, c.ControlRequest(become=order))

    async def _order(self, worker: WorkerId, request: c.ControlRequest) -> WorkerLook:
        request.worker, address = worker, self._address_of(worker)
        try:
            async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
                stub: Any = worker_pb2_grpc.WorkerStub(channel)
                proof = CallProof.of(self._secret, CONTROL, worker)
                call = stub.Control(request, metadata=proof.metadata, timeout=self._timeout_s)
                reply = await call
                if not proof.is_answered(await call.initial_metadata()):
                    raise AuthError(
                        f"the answer of worker {worker} at {address} is not authentic",
                        why="the process at that address did not prove knowledge of the cluster secret",
                        todo="check which process listens there",
                    )
        except grpc.aio.AioRpcError as error:
            raise _explained(worker, address, error) from error
        try:
            return _look(reply)
        except ValueError as error:
            what = f"the answer of worker {worker} at {address} is not understood"
            todo = "run one release of Tandem everywhere, or wait until all are"
            raise UnavailableError(what, why=str(error), todo=todo) from error


def _look(reply: c.ControlReply) -> WorkerLook:
    return from_proto(WorkerLook, reply, target=RoleName(reply.target_role) if reply.target_role else None)


def _explained(worker: WorkerId, address: str, error: grpc.aio.AioRpcError) -> TandemError:
    what, why, code = f"worker {worker} at {address} was not reached", str(error.details()), error.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return AuthError(f"worker {worker} refuses the order", why=why, todo="use the secret of its cluster")
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(what, why=why, todo="look up its present address")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(f"worker {worker} refuses the order", why=why)
    return UnavailableError(what, why=f"{code.name}: {why}", todo="look at its log, or wait until it is back")
