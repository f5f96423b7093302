"""One stream to one worker in one incarnation: hello, submissions out, tokens in, pings both ways, back-off.

The worker's requests fail at once when the stream breaks, when its process shows no life for a lease, or when its loop
stands for longer (STAND_S); the link then reconnects for as long as the worker is registered.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from tandem.core.call_proof import STREAM, CallProof, stream_target
from tandem.core.clock import Clock
from tandem.core.errors import CapacityError, TandemError, WorkerLostError, from_code
from tandem.core.ids import Incarnation, RouterId, WorkerId
from tandem.core.lease_timing import BEAT_S, PROOF_OF_LIFE, STAND_S
from tandem.core.link_speed import ReportedLink
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import WorkerState
from tandem.core.timeout_scale import patient
from tandem.core.version import stream_refusal
from tandem.router.routing.observed_traffic import COMPUTING_SECONDS, ComputingShare, Outstanding
from tandem.router.workers import proto_convert
from tandem.router.workers.proto_convert import PromptChunk, ReportedLoad, TokenChunk, WorkerFacts
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc as w_grpc

_log = logging.getLogger(__name__)

HELLO_S = patient(2.0)
PING_S = BEAT_S
SILENCE_S = STAND_S
"""A worker that sends nothing for so long is lost, though its process lives; one that does not live is sooner."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
MAX_UNSENT = 10_000
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_OPTIONS = (
    *PROOF_OF_LIFE,
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """A worker's address, from the registry."""

    worker: WorkerId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This router's identity, and the secret that proves that it belongs to the cluster."""

    router: RouterId
    incarnation: Incarnation
    secret: ClusterSecret


class LinkListener(Protocol):
    """Receives what arrives on a link; called on the event loop and must not block."""

    def on_tokens(self, link: WorkerLink, chunks: Sequence[TokenChunk]) -> None: ...
    def on_prompts(self, link: WorkerLink, chunks: Sequence[PromptChunk]) -> None: ...
    def on_failed(self, link: WorkerLink, request: str, attempt: int, error: TandemError) -> None: ...
    def on_phase(self, link: WorkerLink, request: str, attempt: int, phase: str) -> None: ...
    def on_up(self, link: WorkerLink) -> None: ...
    def on_state_change(self, link: WorkerLink) -> None:
        """Called with each state that the worker reports; it is acknowledged after this, unless this holds it back."""

    def on_state(self, link: WorkerLink) -> None: ...
    def on_beat(self, link: WorkerLink) -> None: ...
    def on_lost(self, link: WorkerLink, why: str) -> None: ...


class WorkerLink:
    """`facts` are known while `is_up`; `trouble` gives the reason while it is not."""

    def __init__(self, where: WorkerAddress, identity: Identity, listener: LinkListener, clock: Clock) -> None:
        self.where = where
        self.facts: WorkerFacts | None = None
        self.load = ReportedLoad()
        self.trouble = "connecting"
        self.is_registered = True
        self.state = WorkerState.READY
        self.hands_back = False
        """This router's requests there are to go on elsewhere, if another worker can take them."""
        self.keeps_blocks = False
        """It drains to go on in another role, with the blocks that it has."""
        self._pending_ack, self._is_held = 0, False
        """Its last state that is not acknowledged yet, 0 = none, and whether that has to wait for `acknowledge`."""
        self.last_used = 0
        self.outstanding = Outstanding()
        self.computing = ComputingShare()
        self.requests: set[str] = set()
        """Requests of this router that wait for something from here."""
        self._identity, self._listener, self._clock = identity, listener, clock
        self._unsent: deque[w.RouterMessage] = deque()
        self._has_unsent = asyncio.Event()
        self._pending_audits: dict[int, asyncio.Future[w.AuditReport]] = {}
        self._heard_s, self._writing_s = 0.0, math.inf
        """When its last message came, and since when a write waits for it to read."""
        self.version = ""
        """Release that the worker runs; "" = not reported."""
        self.clock_skew_s: float | None = None
        """By how much its clock was ahead of ours when it greeted, and the greeting's way; None = not reported."""

    @property
    def worker(self) -> WorkerId:
        return self.where.worker

    @property
    def used_links(self) -> Sequence[ReportedLink]:
        """Links over which this worker sends KV to others, from its last report."""
        return self.load.links

    @property
    def is_up(self) -> bool:
        return self.facts is not None

    @property
    def takes_work(self) -> bool:
        """True if new requests may be planned for it."""
        return self.facts is not None and self.is_registered and self.state is WorkerState.READY

    def send(self, message: w.RouterMessage) -> None:
        """Queue a message; raises WorkerLostError if the worker is not connected, CapacityError if it does not read."""
        if not self.is_up:
            raise WorkerLostError(f"worker {self.worker} is not connected", why=self.trouble, todo="try again")
        if len(self._unsent) >= MAX_UNSENT:
            raise CapacityError(f"worker {self.worker} does not keep up", todo="try again later")
        self._unsent.append(message)
        self._has_unsent.set()

    async def ask(self, message: w.RouterMessage, number: int, timeout_s: float) -> w.AuditReport:
        """Send a question with this id and wait for the report that answers it; WorkerLostError if none comes."""
        future: asyncio.Future[w.AuditReport] = asyncio.get_running_loop().create_future()
        self._pending_audits[number] = future
        try:
            self.send(message)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            why = f"no report came within {timeout_s:g} s"
            raise WorkerLostError(f"worker {self.worker} did not answer", why=why, todo="ask again") from None
        finally:
            del self._pending_audits[number]

    def hold(self) -> None:
        """That it drains is acknowledged when `acknowledge` is called, and not before."""
        self._is_held = True

    def acknowledge(self) -> None:
        """Acknowledge its last state: nothing more comes that was planned before."""
        self._is_held = False
        if self._pending_ack and self.is_up:
            self._unsent.append(proto_convert.state_heard(self._pending_ack))  # behind what was sent while it took work
            self._has_unsent.set()
        self._pending_ack = 0

    async def run(self) -> None:
        """Connect, serve, reconnect; returns when the worker is lost and no longer registered."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            was_up = await self._session()
            if not self.is_registered:
                return
            backoff_s = FIRST_BACKOFF_S if was_up else min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def _session(self) -> bool:
        """One connection, from dialling to its end; True if it got as far as both hellos."""
        why = "the router is shutting down"
        try:
            async with grpc.aio.insecure_channel(self.where.address, options=_OPTIONS) as channel:
                stub = w_grpc.WorkerStub(channel)
                target = stream_target(self.where.worker, self.where.incarnation)
                proof = CallProof.of(self._identity.secret, STREAM, target)
                call: Any = stub.Stream(metadata=proof.metadata)  # type: ignore[call-arg]
                try:
                    await self._greet(call, proof)
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._read(call))
                        group.create_task(self._write(call))
                        group.create_task(self._beat())
                finally:
                    call.cancel()
        except* (grpc.RpcError, _BrokenError, TimeoutError, asyncio.InvalidStateError) as errors:
            why = _explain(errors)
        except* Exception as errors:  # noqa: BLE001 - of ours: the other workers' streams go on
            _log.exception("the stream of worker %s ended by an error of this router", self.worker)
            why = f"this router failed: {_explain(errors)}"
        finally:
            was_up = self._close(why)
        return was_up

    async def _greet(self, call: Any, proof: CallProof) -> None:
        identity = self._identity
        async with asyncio.timeout(HELLO_S):
            if not proof.is_answered(await _heard(call.initial_metadata())):
                await _next(call)  # raises why it was refused
                raise _BrokenError("the worker did not prove that it knows the cluster secret")
            await call.write(proto_convert.hello(identity.router, identity.incarnation, self.where.incarnation))
            answer = await _next(call)
        if answer is _EOF or answer.WhichOneof("kind") != "hello":
            raise _BrokenError("the worker sent no hello")
        try:
            facts = proto_convert.facts_from_wire(answer.hello.info)
        except ValueError as error:
            raise _BrokenError(f"the worker's hello is invalid: {error}") from error
        if facts.worker != self.where.worker or facts.incarnation != self.where.incarnation:
            raise _BrokenError(f"{facts.worker} in incarnation {facts.incarnation} answers at this address")
        if why := stream_refusal(facts.protocol):
            raise _BrokenError(why)
        self._heard_s = self._clock.now_s()
        hello = answer.hello
        self.version = hello.version
        self.clock_skew_s = hello.wall_s - time.time() if hello.wall_s else None
        self.facts, self.trouble = facts, ""
        self.state, self.hands_back = proto_convert.worker_state(answer.hello.info.state), False
        self.keeps_blocks = False
        event(_log, "worker connected", worker=self.worker, role=facts.role, incarnation=facts.incarnation)
        self._listener.on_up(self)

    async def _read(self, call: Any) -> None:
        while True:
            message = await _next(call)
            if message is _EOF:
                raise _BrokenError("the worker ended the stream")
            self._heard_s = self._clock.now_s()
            self._listener.on_beat(self)
            for one in proto_convert.each(message):
                self._hear(one)

    def _hear(self, message: w.WorkerMessage) -> None:
        listener, kind = self._listener, message.WhichOneof("kind")
        if kind == "tokens":
            if message.tokens.prompts:
                listener.on_prompts(self, [proto_convert.prompt_from_wire(chunk) for chunk in message.tokens.prompts])
            listener.on_tokens(self, [proto_convert.chunk_from_wire(chunk) for chunk in message.tokens.chunks])
        elif kind == "load":
            now_s = self._clock.now_s()
            self.load = proto_convert.load_from_wire(message.load, now_s)
            self.outstanding.report(now_s)
            self.computing.report(now_s, self.load.counters.get(COMPUTING_SECONDS, 0.0))
        elif kind == "failed":
            failed = message.failed
            listener.on_failed(self, failed.request, failed.attempt, from_code(failed.code, failed.message))
        elif kind == "phase":
            listener.on_phase(self, message.phase.request, message.phase.attempt, message.phase.phase)
        elif kind == "state":
            self.state, self.hands_back = proto_convert.worker_state(message.state.state), message.state.hands_back
            self.keeps_blocks = message.state.keeps_blocks
            self._pending_ack, self._is_held = (
                message.state.sequence,
                self._is_held and self.state is WorkerState.DRAINING,
            )
            listener.on_state_change(self)
            if not self._is_held:
                self.acknowledge()
            listener.on_state(self)
        elif kind == "audit":
            asked = self._pending_audits.get(message.audit.id)
            if asked is not None and not asked.done():
                asked.set_result(message.audit)

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            while self._unsent:
                self._writing_s = self._clock.now_s()
                await call.write(proto_convert.next_of(self._unsent))
                self._writing_s = math.inf

    async def _beat(self) -> None:
        """Ping the worker, and look whether it still speaks and reads: one timer, and none for each write."""
        sequence, self._writing_s = 0, math.inf
        while True:
            due_s = self._clock.now_s() + PING_S
            await asyncio.sleep(PING_S)
            now_s = self._clock.now_s()
            if now_s - due_s > PING_S:
                # This process did not run for a while, so it could not receive: that time proves nothing.
                self._heard_s += now_s - due_s
                self._writing_s += now_s - due_s
            if now_s - self._heard_s > SILENCE_S:
                raise _BrokenError(f"the worker sent nothing for {SILENCE_S:g} s")
            if now_s - self._writing_s > SILENCE_S:
                # It was stopped, and no longer reads; a write to it blocks once the window is full.
                raise _BrokenError(f"the worker read nothing for {SILENCE_S:g} s")
            sequence += 1
            self._unsent.append(proto_convert.ping(sequence))
            self._has_unsent.set()

    def _close(self, why: str) -> bool:
        was_up = self.is_up
        self.facts, self.trouble = None, why
        self.load = ReportedLoad()
        self._pending_ack, self._is_held = 0, False
        self._unsent.clear()
        self.outstanding.clear()
        self.computing.clear()
        for asked in self._pending_audits.values():
            if not asked.done():
                asked.set_exception(WorkerLostError(f"worker {self.worker} was lost", why=why, todo="ask again"))
        if was_up:
            event(_log, "worker lost", logging.WARNING, worker=self.worker, why=why)
            self._lose(why)
        return was_up

    def _lose(self, why: str) -> None:
        try:
            self._listener.on_lost(self, why)
        except Exception:  # noqa: BLE001 - the next session begins all the same
            _log.exception("the loss of worker %s was not handled completely", self.worker)


class _BrokenError(Exception):
    """The stream is of no more use."""


async def _next(call: Any) -> Any:
    """The next message."""
    return await _heard(call.read())


async def _heard(awaited: Awaitable[Any]) -> Any:
    """Return the result of a call; one that the other end cancelled is broken, which grpc.aio reports as our own
    cancellation."""
    try:
        return await awaited
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _BrokenError("the worker cancelled the stream") from None


def _explain(errors: BaseExceptionGroup[BaseException]) -> str:
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, grpc.aio.AioRpcError):
        return f"{first.code().name}: {first.details()}"
    return str(first) or type(first).__name__


LinkFactory = Callable[[WorkerAddress], WorkerLink]
