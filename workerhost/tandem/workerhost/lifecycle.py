"""Control of a worker from outside: drain, uncordon, change of role. One task follows the requested state.

    ready ──drain──▶ draining ──nothing in flight──▶ drained        uncordon: back to ready from either
      ▲                 └──become──▶ flipping ──registered──▶ ready under the other role, as a new incarnation
      └── not registered: the old role, the old incarnation ──┘

A step that does not end is reported in place of "ready", and changes nothing of this.

Nothing is in flight once every router has acknowledged that it plans nothing here, and rank 0, queried after all their
earlier messages, has neither a request nor a transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from typing import Any, Protocol

import grpc
import grpc.aio

from tandem.core.clock import Clock
from tandem.core.errors import UnavailableError
from tandem.core.logs import event
from tandem.core.state_enums import RoleName, WorkerState
from tandem.rpc.v1 import control_pb2 as c
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workerhost.relay import SERVICE, ForRank

_log = logging.getLogger(__name__)
LOOK_EVERY_S, DRAINED_LOOK_EVERY_S = 0.02, 2.0
"""Interval of queries to rank 0, while it drains and afterwards."""
ANSWER_S = 1.0
"""Bound on an answer: rank 0 answers between two steps, or not before its lease is back."""
REGISTER_S = 2.0


class LifecycleTarget(Protocol):
    """Interface of a worker's host for steering."""

    @property
    def info(self) -> w.WorkerInfo: ...

    def to_rank(self, message: ForRank) -> None: ...

    def broadcast_state(self, state: w.WorkerState) -> None:
        """Send it to every router, now and when it connects."""

    @property
    def is_state_heard(self) -> bool:
        """True if every connected router has acknowledged the last broadcast."""

    async def record_state(self, state: WorkerState) -> None:
        """Record it in the registry. Raises UnavailableError."""

    async def take_role(self, role: RoleName) -> None:
        """Become another incarnation with this role, ready for work. Raises UnavailableError with nothing changed."""


class WorkerLifecycle:
    """Belongs to the host's event loop: `run` follows the requests of `drain`, `uncordon` and `become`."""

    def __init__(self, worker: LifecycleTarget, clock: Clock) -> None:
        self._worker, self._clock = worker, clock
        self._is_cordoned = False
        self._target: RoleName | None = None
        self._hand_back_s = math.inf
        self._is_handing_back = False
        self._state, self._is_recorded = WorkerState.READY, True
        self._is_stalled = False
        self._sequence = 0
        self._wished = asyncio.Event()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[e.Looked]] = {}
        self._looked = e.Looked()
        self._flips, self._flip_s, self._failure = 0, 0.0, ""

    def stall(self, is_stalled: bool) -> None:
        """Note that a step of the engine does not end, or has ended after all."""
        self._is_stalled = is_stalled
        if self._state is WorkerState.READY:
            self._say()

    # ---- wishes ----------------------------------------------------------------------------------------------------

    def drain(self, deadline_s: float | None = None) -> None:
        """Take no new work. Requests that still run after `deadline_s` are handed back to routers; None = they end
        here."""
        self._is_cordoned = True
        self._begin(deadline_s)

    def uncordon(self) -> None:
        """Take work again; a change of role that still drains is cancelled."""
        self._is_cordoned, self._target = False, None
        if self._state is not WorkerState.FLIPPING:  # a flip ends in a moment, and in READY
            self._enter(WorkerState.READY)
        self._wished.set()

    def become(self, role: RoleName, deadline_s: float | None = None) -> None:
        """Take this role once nothing is in flight. With the present role: stay, or stop draining for another."""
        self._failure = ""
        if role == self._worker.info.role and self._state is not WorkerState.FLIPPING:
            self._target = None
            if not self._is_cordoned:
                self._enter(WorkerState.READY)
            self._wished.set()
            return
        self._target = role
        self._begin(deadline_s)

    def _begin(self, deadline_s: float | None) -> None:
        self._hand_back_s = math.inf if deadline_s is None else self._clock.now_s() + max(0.0, deadline_s)
        self._leave()
        self._wished.set()

    def _leave(self) -> None:
        if self._state is WorkerState.READY:
            self._sequence += 1
            self._enter(WorkerState.DRAINING)

    # ---- the service -----------------------------------------------------------------------------------------------

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The method `Control` of the service `Worker`."""
        control = grpc.unary_unary_rpc_method_handler(
            self.Control,
            request_deserializer=c.ControlRequest.FromString,
            response_serializer=c.ControlReply.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Control": control})

    async def Control(self, request: c.ControlRequest, context: Any) -> c.ControlReply:  # noqa: N802
        info, kind = self._worker.info, request.WhichOneof("kind")
        if not info.incarnation:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker is starting")
        if request.worker != info.worker:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this is worker {info.worker}")
        if kind == "drain":
            self.drain(request.drain.deadline_s if request.drain.HasField("deadline_s") else None)
        elif kind == "uncordon":
            self.uncordon()
        elif kind == "become":
            try:
                role = RoleName(request.become.role)
            except ValueError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"there is no role {request.become.role!r}")
                raise AssertionError("abort raises") from None
            self.become(role, request.become.deadline_s if request.become.HasField("deadline_s") else None)
        elif kind != "look":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this order is unknown")
        return await self.look()

    async def look(self) -> c.ControlReply:
        """Return the present state."""
        answer = await self._ask()
        looked, info, state = self._looked, self._worker.info, self._state
        if state is WorkerState.DRAINED and answer is not None and not _is_quiet(answer):
            state = WorkerState.DRAINING
        return c.ControlReply(
            worker=info.worker,
            incarnation=info.incarnation,
            role=info.role,
            state=state.value,
            target_role="" if self._target is None else self._target.value,
            in_flight=looked.in_flight,
            leases=looked.leases,
            flips=self._flips,
            last_flip_s=self._flip_s,
            flip_failure=self._failure,
        )

    # ---- following them --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the requested state until cancelled."""
        while True:
            self._wished.clear()
            try:
                pause_s = await self._turn()
                await self._record()
            except (UnavailableError, TimeoutError) as error:  # recorded in the registry later; routers know
                event(_log, "state not registered", logging.WARNING, state=self._state, error=error)
                pause_s = ANSWER_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._wished.wait()
            except TimeoutError:
                continue

    async def _turn(self) -> float | None:
        """Compare the requested state with the present one; returns seconds until the next look, None = at the next
        request."""
        if self._target == self._worker.info.role:
            self._target = None
        if not self._is_cordoned and self._target is None:
            self._enter(WorkerState.READY)
            return None
        self._leave()
        if self._clock.now_s() >= self._hand_back_s and not self._is_handing_back:
            self._is_handing_back = True
            self._say()
        sequence, is_heard = self._sequence, self._worker.is_state_heard  # before the query behind earlier messages
        looked = await self._ask()
        if sequence != self._sequence:  # it took work in between
            return 0.0
        if looked is None or not is_heard or not _is_quiet(looked):
            if self._state is WorkerState.DRAINED and looked is not None:
                self._enter(WorkerState.DRAINING)
            return LOOK_EVERY_S
        if self._target is not None:
            await self._flip(self._target)
            return 0.0
        if self._is_cordoned:
            self._enter(WorkerState.DRAINED)
        return DRAINED_LOOK_EVERY_S

    async def _flip(self, role: RoleName) -> None:
        self._state = WorkerState.FLIPPING
        was_cordoned, self._is_cordoned = self._is_cordoned, False
        self._is_handing_back, self._hand_back_s = False, math.inf  # later requests have deadlines of their own
        began_s = self._clock.now_s()
        try:
            async with asyncio.timeout(REGISTER_S):
                await self._worker.take_role(role)
        except (UnavailableError, TimeoutError) as error:
            why = str(error) or f"the registry did not answer within {REGISTER_S:g} s"
            self._failure = f"it could not be registered as {role.value}: {why}"
            event(_log, "role not changed", logging.WARNING, role=role, why=why)
            self._state = WorkerState.DRAINING  # the state that routers know
            self._is_cordoned = self._is_cordoned or was_cordoned
        else:
            await self._ask()  # behind the message that gives rank 0 its role
            self._flips, self._flip_s = self._flips + 1, self._clock.now_s() - began_s
            self._state, self._is_recorded = WorkerState.READY, True
            event(_log, "role changed", role=role, took_s=self._flip_s)
        if self._target is role:
            self._target = None

    def _enter(self, state: WorkerState) -> None:
        if state is self._state:
            return
        self._state, self._is_recorded = state, False
        if state is WorkerState.READY:
            self._is_handing_back, self._hand_back_s = False, math.inf
        self._say()

    def _say(self) -> None:
        is_stalled = self._is_stalled and self._state is WorkerState.READY
        said = w.WorkerState(
            sequence=self._sequence,
            state=(WorkerState.STALLED if is_stalled else self._state).value,
            hands_back=self._is_handing_back,
            keeps_blocks=self._target is not None,
        )
        self._worker.broadcast_state(said)

    async def _record(self) -> None:
        if not self._is_recorded:
            state = self._state
            async with asyncio.timeout(REGISTER_S):
                await self._worker.record_state(state)
            self._is_recorded = state is self._state

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def looked(self, answer: e.Looked) -> None:
        """Take in an answer of rank 0."""
        self._looked = answer
        asked = self._asked.pop(answer.id, None)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    async def _ask(self) -> e.Looked | None:
        """Ask rank 0 for what is in flight; None if it does not answer now."""
        number = next(self._numbers)
        answer: asyncio.Future[e.Looked] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self._worker.to_rank(e.HostToRank(look=e.Look(id=number)))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)


def _is_quiet(looked: e.Looked) -> bool:
    return looked.is_idle and not looked.in_flight and not looked.leases
