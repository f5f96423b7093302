"""Shared by all client APIs: one router's parts, the pace at which requests are let in, and the way from an API call to
requests that may be dispatched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem.core.clock import Clock
from tandem.core.config import AdmissionSection, RouterSection
from tandem.core.errors import CapacityError, DeadlineError, TandemError, UnavailableError
from tandem.core.ids import RequestId, WorkerId
from tandem.core.prefill_queue import QueueRules
from tandem.router.admission.admission_controller import POLL_S, AdmissionController, CapacityCheck, QueuedRequest
from tandem.router.admission.fair_queue import FairQueue, Waiting
from tandem.router.admission.slo_classes import SloClasses
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.dispatch.readiness import Readiness
from tandem.router.metrics.router import Metrics
from tandem.router.serving.request_parser import ModelRegistry, RequestParser
from tandem.router.serving.response_stream import ResponseFactory, ResponseStream, cost_of
from tandem.router.tenancy.authenticator import Authenticator
from tandem.router.tracing.calls import Call, Tracing, context_of
from tandem.router.workers.table import WorkerTable

MAX_WAITING = 1024
"""About six seconds of a router on a slow core. Each holds its connection, and at most 128 KB of its body."""
TURNS = 4
"""From one to the next. A message of a worker takes three to be read; with one, requests came in faster than workers'
messages about those before, until answers lagged by seconds."""
BURST = 4
"""So many are let in at once where none waits, and one more for each EACH_S since."""
EACH_S = 0.005
_RETRY_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Newcomer(Waiting):
    let_in: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RequestPacer:
    """Back-pressure: lets new requests in, one in a few turns of the event loop, so that an overloaded router goes on
    with those that it has begun.

    A new request takes as much of the loop as a hundred tokens. In a turn of the loop everything that arrived is dealt
    with, so the more streams there are, the longer a turn and the fewer requests are let in: as many as there is time
    for. Those that wait have cost no more than reading their heads. Tenants take turns. An idle loop turns in
    microseconds.

    Belongs to one event loop. `limit`: so many wait; beyond, the tenant with most of them loses its last one.
    """

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._queue: FairQueue[_Newcomer] = FairQueue(quantum=1, limit=limit)
        self._credit, self._credited_s = float(BURST), 0.0
        self._is_counting = False
        """Turns of the loop, until the next one is let in."""

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def turn(self, tenant: str) -> None:
        """Return when a request of `tenant` is let in; CapacityError if too many wait."""
        if not len(self._queue) and self._is_in_credit():
            return
        if not self._is_counting:
            self._is_counting = True
            self._pass(TURNS)
        newcomer = _Newcomer(tenant=tenant, cost=1, due_s=0.0, gone_s=0.0)
        loser = self._queue.add(newcomer)
        if loser is newcomer:
            raise self._full()
        if loser is not None and not loser.let_in.done():
            loser.let_in.set_exception(self._full())
        try:
            await newcomer.let_in
        except asyncio.CancelledError:
            self._queue.remove(newcomer)
            raise

    def _is_in_credit(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._credit = min(BURST, self._credit + (now_s - self._credited_s) / EACH_S)
        self._credited_s = now_s
        is_enough = self._credit >= 1
        self._credit -= is_enough
        return is_enough

    def _next(self) -> None:
        first = self._queue.first()
        if first is not None:
            self._queue.take(first)
            if not first.let_in.done():
                first.let_in.set_result(None)
        self._is_counting = len(self._queue) > 0
        if self._is_counting:
            self._pass(TURNS)
        else:
            self._credit, self._credited_s = 0.0, asyncio.get_running_loop().time()

    def _pass(self, turns: int) -> None:
        """Let in the next one so many turns of the loop from now."""
        asyncio.get_running_loop().call_soon(*((self._pass, turns - 1) if turns > 1 else (self._next,)))

    def _full(self) -> TandemError:
        why = f"a router lets {self._limit} wait to be read, and this tenant has the most"
        return CapacityError("too many requests wait", why=why, todo="send it again later", retry_after_s=_RETRY_S)


class Pump:
    """Calls `pump` of `admission`, every POLL_S on the event loop, while any request waits there."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer: a request waits."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._admission.pump()
        finally:
            if self._admission.waiting:
                self.start()


def create_admission(
    rules: AdmissionSection, classes: SloClasses, table: WorkerTable, clock: Clock, metrics: Metrics
) -> AdmissionController:
    """Admission control in front of the workers of `table`; it looks at its queue again while requests wait."""
    room = CapacityCheck(rules, lambda: classes.least_itl_s)

    def has_place(worker: WorkerId, request: QueuedRequest) -> bool:
        link = table.link(worker)
        return link is not None and room.is_there_whole(request, link, clock.now_s())

    admission = AdmissionController(
        rules,
        clock,
        lambda model, request: room.is_there(request, table.usable(model), clock.now_s()),
        metrics,
        on_waiting=lambda: pump.start(),
        order=lambda: next((link.load.queue_rules for link in table.usable()), QueueRules()),
        has_place=has_place,
    )
    pump = Pump(admission)
    return admission


def stopping_error() -> TandemError:
    """For requests that come while the router stops."""
    return UnavailableError("this router is stopping", todo="send the request again", retry_after_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """`wall_s` gives seconds since 1970 for `created` fields; durations are measured with `clock`."""

    reader: RequestParser
    response_factory: ResponseFactory
    metrics: Metrics
    readiness: Readiness
    gate: Authenticator
    classes: SloClasses
    settings: RouterSection
    clock: Clock
    wall_s: Callable[[], float]
    started_s: int
    scrape: Callable[[], Awaitable[bytes]]
    """Metrics of the router, of all its processes; raises UnavailableError."""
    tracing: Tracing | None = None
    intake: RequestPacer = field(default_factory=RequestPacer)

    @property
    def is_traced(self) -> bool:
        """True if the trace context that clients send is used."""
        return self.tracing is not None

    def begin(self, api: str, headers: Iterable[tuple[str, str]], received_s: float) -> Call | None:
        """The trace of a call with these headers, or gRPC metadata; None = it has none."""
        return None if self.tracing is None else self.tracing.begin(api, context_of(headers), received_s)

    async def read(
        self, ask: GenerationRequest, received_s: float, call: Call | None = None
    ) -> list[GenerationRequest]:
        """One request a prompt of a call that arrived at `received_s`; refuses everything while the router stops."""
        if self.readiness.is_draining:
            raise stopping_error()
        terms = self.classes.terms(ask.caller, ask.wish)
        works = await self._in_time(self.reader.read(ask), received_s, terms.timeout_s)
        if not terms.is_background:
            await self.response_factory.budgets.spend(terms.tenant, cost_of(works))
        for work in works:
            work.terms, work.timeout_s = terms, terms.timeout_s
            work.arrived_s, work.trace_id = received_s, call.trace_id if call is not None else ""
        return works

    async def _in_time(
        self, reading: Awaitable[list[GenerationRequest]], received_s: float, timeout_s: float
    ) -> list[GenerationRequest]:
        """DeadlineError if the prompt is not tokenised in the time that its whole answer has."""
        try:
            async with asyncio.timeout(received_s + timeout_s - self.clock.now_s()):
                return await reading
        except TimeoutError:
            why = f"its prompt was not tokenised within {timeout_s:g} s"
            raise DeadlineError("no answer in the time that was given", why=why, todo="try later") from None

    def open(self, request: RequestId, works: Sequence[GenerationRequest], call: Call | None = None) -> ResponseStream:
        """A context manager; entering it sends `works` to workers, at once or when their turn comes. `call` is ended
        with the answer."""
        tokenizer = self.models.find(works[0].served_model).tokenizer
        return self.response_factory.open(request, works, tokenizer, call)

    def refused(self, api: str, error: TandemError, call: Call | None = None) -> None:
        """Count a request that never became an answer, and end its trace."""
        self.metrics.request_ended(api, error.code)
        if call is not None:
            call.refuse(error)

    @property
    def models(self) -> ModelRegistry:
        return self.reader.models
