"""Dispatcher: sends requests to the workers of a plan, routes answers, and reports every end.

Each end of a request is reported to all of its workers. A failed attempt is followed by another one that carries what
the client has; retry_policy.py decides where and when.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, cast

from tandem.core.clock import Clock
from tandem.core.config import Disaggregation
from tandem.core.errors import DeadlineError, InternalError, TandemError, UnavailableError, WorkerLostError
from tandem.core.ids import RequestId, WorkerId
from tandem.core.logs import event
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import Phase, RoleName
from tandem.router.admission.slo_classes import SloTerms
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest, InFlightRequest
from tandem.router.dispatch.migration import CAUSE as MOVED
from tandem.router.dispatch.migration import REASON as MOVED_REASON
from tandem.router.dispatch.migration import MigrationQueue, plan_move
from tandem.router.dispatch.retry_policy import Failure, Member, RetryLater, RetryPolicy, judge, lost, stalled
from tandem.router.dispatch.submissions import NotSentError, Submitter
from tandem.router.dispatch.traces import DemandBook, TraceBook, trace_of
from tandem.router.routing.cost_model import with_sources
from tandem.router.routing.observed_traffic import AnswerLengths, HotPrefixes
from tandem.router.routing.plan import Candidate, Plan, has_choice
from tandem.router.workers import proto_convert
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder, PrefixView
from tandem.router.workers.proto_convert import PromptChunk, TokenChunk
from tandem.router.workers.table import WorkerTable

_log = logging.getLogger(__name__)
SWEEP_S = 1.0
_ORDER: dict[str, int] = {Phase.QUEUED: 0, Phase.PREFILL: 1, Phase.TRANSFER: 2, Phase.DECODE: 3}
SPACING_S = 0.002
"""Between attempts of requests that one worker lost, or that waited for one: planning all of them at once would stop
the event loop."""


class DispatchMeter(Protocol):
    """Counts plans, dropped messages, further attempts and requests that were given up."""

    def planned(self, plan: Plan) -> None: ...
    def dropped(self, reason: str) -> None: ...
    def attempted_again(self, cause: str) -> None: ...
    def gave_up(self, reason: str) -> None: ...


class DispatchListener(Protocol):
    """Receives what a dispatcher learns of workers."""

    def on_link_up(self) -> None:
        """A worker is connected."""

    def on_proven(self, pair: Sequence[Member]) -> None:
        """These just answered a request of more than one token together."""


class Queue(Protocol):
    """Requests that wait in this router for room, and are no flights yet; an `AdmissionController` is one."""

    def waiting_for(self, model: str) -> int:
        """Return how many wait for workers of this model."""

    def check_slo(self, terms: SloTerms, arrived_s: float, first_token_s: float, compute_s: float) -> None:
        """Raise the client's error if a request is not worth serving so late."""


class Dispatcher:
    """Owns the in-flight requests of this router. Everything runs on the event loop."""

    def __init__(
        self,
        table: WorkerTable,
        retry_policy: RetryPolicy,
        prefixes: PrefixFinder,
        clock: Clock,
        meter: DispatchMeter,
        listener: DispatchListener,
        queue: Queue,
    ) -> None:
        self._table, self._retry_policy, self._prefixes = table, retry_policy, prefixes
        self._clock, self._meter, self._listener, self._queue = clock, meter, listener, queue
        self.hot = HotPrefixes()
        self.on_state_change: Callable[[WorkerLink], None] = lambda link: None
        """Called with every state of a worker, before that is acknowledged."""
        self._legs = Submitter(table, prefixes, self.hot)
        self._lengths = AnswerLengths()
        self.traces = TraceBook()
        self.demand = DemandBook()
        self._flights: dict[RequestId, InFlightRequest] = {}
        self._waiting: dict[RequestId, asyncio.TimerHandle] = {}
        """Timers of flights that wait between two attempts, or before the first."""
        self._retry_queue: deque[RequestId] = deque()
        """Of those that waited when the last worker came, the ones that have not been tried since."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._handed_back = MigrationQueue(self._move, SPACING_S)

    @property
    def flights(self) -> list[InFlightRequest]:
        return list(self._flights.values())

    @property
    def waiting(self) -> int:
        """Flights that no worker has now."""
        return len(self._waiting)

    def stranded(self, model: str) -> int:
        """Flights of this model that no worker has had yet: none could serve them on arrival."""
        waiting = (self._flights[request] for request in self._waiting)
        return sum(flight.work.model == model and not flight.history.failures for flight in waiting)

    @contextmanager
    def submit(
        self, request: RequestId, slot: int, work: GenerationRequest, inbox: ArrivalQueue, plan: Plan | None = None, *,
        left_s: float | None = None,
    ) -> Iterator[InFlightRequest]:  # fmt: skip
        """Send `work` off; its tokens, or its failure, arrive in `inbox`. Leaving cancels what is still running.

        `left_s`: of its time; None = all of it. With a `plan` it is tried once, there, and no client waits for it.
        """
        loop = asyncio.get_running_loop()
        error = DeadlineError(f"no complete answer within {work.timeout_s:g} s", todo="ask for less or try later")
        deadline = loop.call_later(work.timeout_s if left_s is None else left_s, inbox.fail, error)
        now_s = self._clock.now_s()
        flight = InFlightRequest(id=request, slot=slot, work=work, inbox=inbox, started_s=now_s, left_s=left_s)
        if plan is not None:
            flight.plan, flight.is_probe = plan, True
        self._flights[request] = flight
        try:
            self._retry_policy.budget.deposit()
            self._start(flight)
            yield flight
        finally:
            deadline.cancel()
            self._end(flight)

    def end_choice(self, flight: InFlightRequest, choice: int) -> None:
        """Stop generating this choice at every worker: it is wanted no more. With the last one the request ends."""
        flight.end_choice(choice)
        if flight.is_finished:
            self._end(flight)
            return
        for link in flight.legs.values():
            if link.is_up:
                with suppress(TandemError):  # it does not read any more; its lease decides
                    link.send(proto_convert.end_choices(flight.id, flight.attempt, [choice]))

    # ---- out -------------------------------------------------------------------------------------------------------

    def _start(self, flight: InFlightRequest) -> None:
        """Send the flight's current attempt off, or have it wait; raises if no worker can take it."""
        view, now_s = self._look_up(flight.work, flight.sampling), self._clock.now_s()
        if not flight.is_probe:
            plan = self._plan(flight, view, now_s)
            if isinstance(plan, RetryLater):
                self._wake(flight, plan.until_s - now_s)
                return
            if not flight.history.failures:
                self._check_in_time(flight.work, plan)
            flight.plan = plan
            self._meter.planned(plan)
        self._send(flight, view, now_s)

    def _send(self, flight: InFlightRequest, view: PrefixView, now_s: float) -> None:
        flight.progress_s = now_s
        try:
            self._legs.send(flight, view, now_s)
        except NotSentError as failed:
            if flight.is_probe:
                raise failed.error from None
            self._failed(flight, judge(failed.error, _member(failed.link), None), failed.error)
            return
        flight.mark("sent", now_s)
        for member in flight.pair:
            self._retry_policy.breakers.sent(member, flight.id)

    def _check_in_time(self, work: GenerationRequest, plan: Plan) -> None:
        if plan.cost is not None and work.arrived_s is not None:
            self._queue.check_slo(work.terms, work.arrived_s, plan.cost.first_token_s, plan.cost.compute_s)

    def _look_up(self, work: GenerationRequest, sampling: SamplingParams) -> PrefixView:
        facts = [link.facts for link in self._table.usable(work.model) if link.facts is not None]
        view = self._prefixes.find(work.prompt, facts, work.salt, work.hashes)
        return view.computed_whole() if sampling.prompt_logprobs is not None else view

    def _plan(
        self, flight: InFlightRequest, view: PrefixView, now_s: float, waiting: int | None = None
    ) -> Plan | RetryLater:
        """`waiting`: in the router for the same workers; None = as many as do."""
        waiting = self._queue.waiting_for(flight.work.model) if waiting is None else waiting
        job = flight.job(now_s, view.followers, waiting, self._lengths.mean(flight.work.model))
        candidates = self._candidates(flight.work, view, now_s)
        plan = self._retry_policy.choose(job, candidates, flight.history, flight.work.model)
        return plan if isinstance(plan, RetryLater) else with_sources(plan, job, candidates)

    def _candidates(self, work: GenerationRequest, view: PrefixView | None, now_s: float) -> list[Candidate]:
        return self._table.candidates(view, now_s, model=work.model, cache_key=work.cache_key or "")

    def explain(self, work: GenerationRequest) -> tuple[Plan, list[Candidate]]:
        """The plan for `work` if it came now, and every worker as seen; nothing is sent or counted."""
        now_s, view = self._clock.now_s(), self._look_up(work, work.sampling)
        return self._foresee(work, view, now_s), self._candidates(work, view, now_s)

    def plan_preview(self, work: GenerationRequest) -> Plan:
        """The plan for `work` if it came now."""
        return self._foresee(work, self._look_up(work, work.sampling), self._clock.now_s())

    def alone(self, work: GenerationRequest, waiting: int) -> WorkerId | None:
        """The prefill or decode worker that had better serve it whole, as things are now and with so many others
        `waiting` in the router; None if there is none."""
        roles = [link.facts.role for link in self._table.usable(work.model) if link.facts is not None]
        if self._retry_policy.mode is Disaggregation.NEVER or not has_choice(roles):
            return None
        plan = self._foresee(work, self._look_up(work, work.sampling), self._clock.now_s(), waiting)
        link = None if plan.prefill is not None else self._table.link(plan.decode)
        return plan.decode if link and link.facts and link.facts.role is not RoleName.MIXED else None

    def _foresee(self, work: GenerationRequest, view: PrefixView, now_s: float, waiting: int | None = None) -> Plan:
        flight = InFlightRequest(id=RequestId(""), slot=0, work=work, inbox=ArrivalQueue(0), started_s=now_s)
        plan = self._plan(flight, view, now_s, waiting)
        if isinstance(plan, RetryLater):
            why = "a worker that was lost is expected back"
            raise UnavailableError("nobody can serve it now", why=why, todo="try again")
        return plan

    def _wake(self, flight: InFlightRequest, delay_s: float) -> None:
        """Try the flight again after `delay_s`, or as soon as a worker comes."""
        self._waiting[flight.id] = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._try, flight)

    def _try(self, flight: InFlightRequest) -> None:
        timer = self._waiting.pop(flight.id, None)
        if timer is not None:
            timer.cancel()
        if self._is_over(flight):
            return
        try:
            self._start(flight)
        except TandemError as error:
            self._give_up(flight, "no_worker", error)
        except Exception as error:  # noqa: BLE001 - it would wait for its deadline
            _log.exception("request could not be sent off", extra={"fields": flight.names})
            self._fail(flight, InternalError("the router failed", why=type(error).__name__, todo="report this"))

    def _retry_next(self) -> None:
        """Try the next one that waited for a worker, and the others one by one after it."""
        self._retry_timer = None
        while self._retry_queue:
            request = self._retry_queue.popleft()
            if request in self._waiting:
                self._try(self._flights[request])
                break
        if self._retry_queue:
            self._retry_timer = asyncio.get_running_loop().call_later(SPACING_S, self._retry_next)

    def _failed(self, flight: InFlightRequest, failure: Failure | None, error: TandemError, delay_s: float = 0) -> None:
        """The current attempt is over; another follows unless `error` is the request's own fault (no `failure`)."""
        if self._is_over(flight):
            return
        if failure is None or flight.is_probe:
            self._fail(flight, error)
            return
        self._record_failure(flight, failure)
        flight.mark("failed", self._clock.now_s(), failure.error.message)
        # From here on nothing of the old attempt reaches the client: what is forced now is what the client has.
        old, worker_count = flight.attempt, len(flight.legs)
        flight.begin_attempt(failure.cause.value)
        self._legs.cancel(flight, old, "superseded by another attempt")
        event(
            _log, "attempt failed", logging.WARNING, **flight.names, attempt=old, cause=failure.cause.value,
            why=failure.error.message, legs=worker_count, tokens=flight.output_tokens,
        )  # fmt: skip
        denial = self._retry_policy.denial(flight.history)
        if denial:
            self._give_up(flight, denial, failure.error)
            return
        self._meter.attempted_again(failure.cause.value)
        self._wake(flight, delay_s)

    def _record_failure(self, flight: InFlightRequest, failure: Failure) -> None:
        self._retry_policy.note(flight.history, failure)
        for member in flight.pair:
            self._retry_policy.breakers.ended(member, flight.id)

    def _give_up(self, flight: InFlightRequest, reason: str, error: TandemError) -> None:
        if flight.history.failures:
            self._meter.gave_up(reason)
        self._fail(flight, error)

    def _fail(self, flight: InFlightRequest, error: TandemError) -> None:
        flight.phase = Phase.FAILED
        flight.inbox.fail(error)

    def _is_over(self, flight: InFlightRequest) -> bool:
        return flight.is_finished or flight.inbox.error is not None or flight.id not in self._flights

    def _end(self, flight: InFlightRequest) -> None:
        """Forget a request, and cancel it at every worker that may still hold something of it."""
        is_news = self._flights.pop(flight.id, None) is not None
        timer = self._waiting.pop(flight.id, None)
        if timer is not None:
            timer.cancel()
        reason = flight.inbox.error.code if flight.inbox.error is not None else "finished"
        self._legs.cancel(flight, flight.attempt, reason)
        for member in flight.pair:
            self._retry_policy.breakers.ended(member, flight.id)
        if not flight.phase.is_terminal:
            flight.phase = Phase.FINISHED if flight.is_finished else Phase.CANCELLED
        if is_news and flight.is_finished and not flight.is_probe:
            self._lengths.ended(flight.work.model, flight.output_tokens / len(flight.orders))
        if is_news and not flight.is_probe:
            flight.trace = self.traces.keep(trace_of(flight, self._clock.now_s(), is_over=True))

    # ---- moves -----------------------------------------------------------------------------------------------------

    def _move(self, link: WorkerLink, request: RequestId) -> None:
        """Have it go on elsewhere; where no worker can take it, it goes on where it is."""
        flight = self._flights.get(request)
        if flight is None or flight.legs.get(link.worker) is not link or self._is_over(flight) or flight.is_probe:
            return
        view, now_s = self._look_up(flight.work, flight.sampling), self._clock.now_s()

        def plan_anew() -> Plan | None:
            try:
                plan = self._plan(flight, view, now_s)
            except TandemError:
                return None
            return None if isinstance(plan, RetryLater) else plan

        trusted = self._retry_policy.trusted(self._candidates(flight.work, view, now_s), flight.history)
        plan = plan_move(flight, link, flight.job(now_s), trusted, plan_anew)
        if plan is None:
            return
        flight.history.note_hosts(plan, trusted)
        for member in flight.pair:
            self._retry_policy.breakers.ended(member, flight.id)
        flight.mark("moved", now_s, MOVED_REASON)
        old = flight.attempt
        flight.begin_attempt(MOVED)
        self._legs.cancel(flight, old, MOVED_REASON)
        event(_log, "request moved", **flight.names, attempt=old, worker=link.worker, tokens=flight.output_tokens)
        self._meter.attempted_again(MOVED)
        flight.plan = plan
        try:
            self._send(flight, view, now_s)
        except TandemError as error:
            self._give_up(flight, "no_worker", error)

    async def run(self) -> None:
        """Look after flights without progress, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Move stalled flights, and those that are handed back, to other workers. Where there is none, they go on."""
        self._handed_back.look_again(self._table.links)
        now_s, stall_s = self._clock.now_s(), self._retry_policy.stall_s
        for flight in self.flights:
            link = flight.silent_leg(now_s, stall_s)
            if link is None or self._is_over(flight) or flight.is_probe:
                continue
            flight.progress_s = now_s
            member, candidates = _member(link), self._candidates(flight.work, None, now_s)
            if self._retry_policy.could_avoid(flight.job(now_s), candidates, flight.history, member):
                what = f"worker {link.worker} said nothing of the request for {stall_s:g} s"
                error = WorkerLostError(what, todo="send it again")
                self._failed(flight, stalled(error, member), error)

    # ---- in --------------------------------------------------------------------------------------------------------

    def on_tokens(self, link: WorkerLink, chunks: Sequence[TokenChunk]) -> None:
        now_s, flights, worker = self._clock.now_s(), self._flights, link.worker
        for chunk in chunks:
            flight = flights.get(cast("RequestId", chunk.request))
            if flight is None or flight.legs.get(worker) is not link:
                self._meter.dropped("unknown")
                continue
            if dropped := flight.accept(chunk, now_s):
                self._meter.dropped(dropped)
                if dropped in ("attempt", "choice"):
                    continue
            is_first = link.outstanding.compute(chunk.request)
            if is_first:
                self._prefixes.settle(chunk.request, link.worker)
                if (receiver := flight.legs.get(flight.plan.decode)) is not None and receiver is not link:
                    receiver.outstanding.depart(chunk.request)
                flight.history.revision = link.facts.profile.revision if link.facts is not None else ""
            self._progress(flight, link, is_first=is_first)

    def on_prompts(self, link: WorkerLink, chunks: Sequence[PromptChunk]) -> None:
        for chunk in chunks:
            flight = self._flights.get(RequestId(chunk.request))
            is_known = flight is not None and flight.legs.get(link.worker) is link
            dropped = flight.accept_prompt(chunk) if flight is not None and is_known else "unknown"
            if dropped:
                self._meter.dropped(dropped)

    def _progress(self, flight: InFlightRequest, link: WorkerLink, *, is_first: bool) -> None:
        """`is_first`: of a prompt that this worker computed. A worker that has made a token of its own has proven
        itself; the answer may take minutes from there."""
        plan = flight.plan
        is_decoder = link.worker == plan.decode
        if is_decoder and plan.prefill is not None and plan.prefill in flight.legs:
            if flight.is_handed_over:
                # The sequence lives here now: whatever becomes of the prefill worker no longer matters.
                flight.phase = Phase.DECODE
                prefill = flight.legs[plan.prefill]
                self._legs.release(flight, prefill)
                for leg in (prefill, link):
                    self._retry_policy.breakers.succeeded(_member(leg))
                self._listener.on_proven(flight.pair)
        elif is_decoder and plan.prefill is None and is_first:
            flight.phase = Phase.DECODE
            self._retry_policy.breakers.succeeded(_member(link))
            self._listener.on_proven(flight.pair)
        if flight.is_finished and is_decoder:
            self._retry_policy.breakers.succeeded(_member(link))
            for leg in list(flight.legs.values()):
                self._legs.release(flight, leg)

    def on_failed(self, link: WorkerLink, request: str, attempt: int, error: TandemError) -> None:
        flight = self._flights.get(RequestId(request))
        if flight is None or attempt != flight.attempt or flight.legs.get(link.worker) is not link:
            self._meter.dropped("unknown")
            return
        self._legs.release(flight, link)
        if self._is_needed(flight, link):
            reporter = _member(link)
            peer = next((member for member in flight.pair if member != reporter), None)
            self._failed(flight, judge(error, reporter, peer), error)

    def _is_needed(self, flight: InFlightRequest, link: WorkerLink) -> bool:
        """True for all but the prefill worker, once the decode worker has gone on and every first token is here."""
        is_prefill = link.worker == flight.plan.prefill != flight.plan.decode
        return not (is_prefill and flight.phase is Phase.DECODE and flight.has_first_tokens)

    def on_phase(self, link: WorkerLink, request: str, attempt: int, phase: str) -> None:
        flight = self._flights.get(RequestId(request))
        if flight is None or attempt != flight.attempt or link.worker not in flight.legs:
            return
        now_s = self._clock.now_s()
        flight.mark(phase, now_s)
        if phase == Phase.QUEUED:
            link.outstanding.acknowledge(request)
        if phase == Phase.PREFILL and flight.prefill_started_s is None:
            flight.prefill_started_s = now_s
        if _ORDER.get(flight.phase, len(_ORDER)) < _ORDER.get(phase, -1):
            flight.phase, flight.progress_s = Phase(phase), now_s

    def on_up(self, link: WorkerLink) -> None:
        self._table.note_up(link)
        if link.facts is not None:
            self._retry_policy.recently_lost.came(link.facts)
        self._on_worker_available()

    def _on_worker_available(self) -> None:
        """Retry waiting requests: a worker takes work that did not before."""
        self._retry_queue = deque(self._waiting)
        if self._retry_timer is None:
            self._retry_next()
        self._listener.on_link_up()

    def on_state(self, link: WorkerLink) -> None:
        """It takes work again, takes none from now on, or hands its requests back."""
        if link.takes_work:
            self._on_worker_available()
        elif link.hands_back:
            self._handed_back.add(link)

    def on_beat(self, link: WorkerLink) -> None:
        self._table.note_beat(link)

    def on_lost(self, link: WorkerLink, why: str) -> None:
        self._retry_policy.recently_lost.went(link.worker)
        self._retry_policy.breakers.keep({_member(other) for other in self._table.links})
        error = WorkerLostError(f"worker {link.worker} was lost during the request", why=why, todo="send it again")
        for number, request in enumerate(list(link.requests)):
            flight = self._flights.get(RequestId(request))
            if flight is not None and flight.legs.get(link.worker) is link:
                self._legs.release(flight, link)
                if self._is_needed(flight, link):
                    self._failed(flight, lost(error, _member(link)), error, number * SPACING_S)
        link.requests.clear()


def _member(link: WorkerLink) -> Member:
    return (link.worker, link.where.incarnation)
