"""Sends requests to the workers of a plan, routes what comes back, and takes every end of a request to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from tandem.core.clock import Clock
from tandem.core.errors import DeadlineError, TandemError, UnavailableError, WorkerLostError
from tandem.core.ids import RequestId, WorkerId
from tandem.core.lifecycle import Phase
from tandem.router import wire
from tandem.router.links import WorkerLink
from tandem.router.outstanding import Sent, sent
from tandem.router.plan import Candidate, Job, Plan, Policy
from tandem.router.prefix import PrefixFinder, PrefixView
from tandem.router.requests import Flight, Inbox, Work
from tandem.router.sources import with_sources
from tandem.router.wire import LegOrder, PromptChunk, TokenChunk, WorkerFacts
from tandem.router.workers import WorkerTable
from tandem.rpc.v1 import worker_pb2 as w


class DispatchMeter(Protocol):
    """Counts what a dispatcher sees."""

    def planned(self, plan: Plan) -> None: ...
    def dropped(self, reason: str) -> None: ...


class Dispatcher:
    """Owns the in-flight requests of this router. Everything runs on the event loop."""

    def __init__(
        self, table: WorkerTable, policy: Policy, prefixes: PrefixFinder, clock: Clock, meter: DispatchMeter
    ) -> None:
        self._table, self._policy, self._prefixes = table, policy, prefixes
        self._clock, self._meter = clock, meter
        self._flights: dict[RequestId, Flight] = {}
        self.on_link_up: Callable[[], None] = lambda: None
        self.on_proven: Callable[[tuple[tuple[str, int], ...]], None] = lambda pair: None
        """Told the workers, with incarnations, that just answered a request of more than one token together."""
        self.check: Callable[[Work, Plan], None] = lambda work, plan: None
        """Raises what is to be said to a client whose request had better not be served as planned."""

    @property
    def flights(self) -> list[Flight]:
        return list(self._flights.values())

    @contextmanager
    def fly(
        self, request: RequestId, slot: int, work: Work, inbox: Inbox, plan: Plan | None = None
    ) -> Iterator[Flight]:
        """Send `work` off; its tokens, or its failure, arrive in `inbox`. Leaving cancels what is still running."""
        loop = asyncio.get_running_loop()
        error = DeadlineError(f"no complete answer within {work.timeout_s:g} s", todo="ask for less or try later")
        deadline = loop.call_later(work.timeout_s, inbox.fail, error)
        flight: Flight | None = None
        try:
            flight = self._start(request, slot, work, inbox, plan)
            yield flight
        finally:
            deadline.cancel()
            if flight is not None:
                self._end(flight)

    def end_choice(self, flight: Flight, choice: int) -> None:
        """Nobody wants more of this choice: no worker generates it any further. With the last one the request ends."""
        flight.end_choice(choice)
        if flight.is_finished:
            self._end(flight)
            return
        for link in flight.legs.values():
            if link.is_up:
                with suppress(TandemError):  # it does not read any more; its lease decides
                    link.send(wire.end_choices(flight.id, flight.attempt, [choice]))

    # ---- out -------------------------------------------------------------------------------------------------------

    def _start(self, request: RequestId, slot: int, work: Work, inbox: Inbox, plan: Plan | None) -> Flight:
        now_s = self._clock.now_s()
        view = self._look_up(work)
        if plan is None:
            plan = self._plan(work, view, now_s)
            self.check(work, plan)
            self._meter.planned(plan)
        flight = Flight(id=request, slot=slot, work=work, inbox=inbox, plan=plan, started_s=now_s)
        self._flights[request] = flight
        try:
            self._send(flight, view)
        except BaseException:
            self._end(flight)
            raise
        return flight

    def _look_up(self, work: Work) -> PrefixView:
        facts = [link.facts for link in self._table.usable(work.model) if link.facts is not None]
        view = self._prefixes.find(work.prompt, facts, work.salt)
        return view.computed_whole() if work.sampling.prompt_logprobs is not None else view

    def _plan(self, work: Work, view: PrefixView, now_s: float) -> Plan:
        job, candidates = job_of(work, now_s), self._candidates(work, view, now_s)
        return with_sources(self._policy.plan(job, candidates), job, candidates)

    def explain(self, work: Work) -> tuple[Plan, list[Candidate]]:
        """What would be done with `work` now, and what is known of every worker; nothing is sent or counted."""
        now_s, view = self._clock.now_s(), self._look_up(work)
        return self._plan(work, view, now_s), self._candidates(work, view, now_s)

    def _candidates(self, work: Work, view: PrefixView, now_s: float) -> list[Candidate]:
        return self._table.candidates(view, now_s, model=work.model, cache_key=work.cache_key)

    def _send(self, flight: Flight, view: PrefixView) -> None:
        plan = flight.plan
        decode = self._connected(plan.decode)
        if plan.prefill is None:
            self._send_leg(flight, decode, None, w.LEG_FULL, view)
            return
        prefill = self._connected(plan.prefill)
        # The announcement first: the prefill worker may ask for its ticket at once.
        self._send_leg(flight, decode, prefill, w.LEG_DECODE, view)
        self._send_leg(flight, prefill, decode, w.LEG_PREFILL, view)

    def _send_leg(
        self, flight: Flight, link: WorkerLink, peer: WorkerLink | None, leg: w.Leg.ValueType, view: PrefixView
    ) -> None:
        work = flight.work
        sources = self._sources(flight.plan) if leg != w.LEG_DECODE else []
        order = LegOrder(
            request=flight.id,
            attempt=flight.attempt,
            leg=leg,
            prompt=work.prompt,
            sampling=work.sampling,
            salt=work.salt or self._prefixes.salt,
            last_block_hash=view.last_hashes.get(link.worker, b""),
            timeout_s=work.timeout_s,
            peer=peer.facts if peer is not None else None,
            sources=sources,
        )
        link.send(wire.submit(order))
        flight.legs[link.worker] = link
        flight.pair += ((link.worker, link.where.incarnation),)
        link.requests.add(flight.id)
        if leg != w.LEG_DECODE and link.facts is not None:
            known = max([view.reusable_tokens.get(link.worker, 0), *(tokens for _, tokens in sources[:1])])
            self._prefixes.expect(flight.id, link.facts, view)
            flight.predict(known, link.facts.block_tokens, is_hoped=view.expected_tokens[link.worker] > 0)
        link.outstanding.add(flight.id, self._sent(flight, link, leg, view))
        self._table.note_use(link)

    def _sent(self, flight: Flight, link: WorkerLink, leg: w.Leg.ValueType, view: PrefixView) -> Sent:
        """What this leg adds to the worker's load, until its load reports say so."""
        known = [view.reusable_tokens.get(link.worker, 0), *(source.tokens for source in flight.plan.sources[:1])]
        return sent(
            job_of(flight.work, flight.started_s),
            held_tokens=view.held_tokens.get(link.worker, 0),
            known_tokens=None if leg == w.LEG_DECODE else max(known),
            block_tokens=link.facts.block_tokens if link.facts is not None else 1,
            rules=link.load.queue_rules,
            speed=link.load.prefill_speed,
        )

    def _sources(self, plan: Plan) -> list[tuple[WorkerFacts, int]]:
        """Those of the plan's sources that are here, as the worker that fetches must address them."""
        links = [(self._table.link(source.worker), source.tokens) for source in plan.sources]
        return [(link.facts, tokens) for link, tokens in links if link is not None and link.facts is not None]

    def _connected(self, worker: WorkerId) -> WorkerLink:
        link = self._table.link(worker)
        if link is None or not link.is_up:
            raise UnavailableError(f"worker {worker} is not connected", todo="try again")
        return link

    def _end(self, flight: Flight) -> None:
        """Forget a request, and tell every worker that may still hold something of it."""
        self._flights.pop(flight.id, None)
        for link in list(flight.legs.values()):
            self._release(flight, link)
            if link.is_up:
                reason = flight.inbox.error.code if flight.inbox.error is not None else "finished"
                try:
                    link.send(wire.cancel(flight.id, flight.attempt, reason))
                except TandemError:
                    continue  # it does not read any more; its lease decides
        if not flight.phase.is_terminal:
            flight.phase = Phase.FINISHED if flight.is_finished else Phase.CANCELLED

    def _release(self, flight: Flight, link: WorkerLink) -> None:
        flight.legs.pop(link.worker, None)
        link.requests.discard(flight.id)
        link.outstanding.end(flight.id)
        self._prefixes.withdraw(flight.id, link.worker)

    # ---- in --------------------------------------------------------------------------------------------------------

    def on_tokens(self, link: WorkerLink, chunks: Sequence[TokenChunk]) -> None:
        now_s = self._clock.now_s()
        for chunk in chunks:
            flight = self._flights.get(RequestId(chunk.request))
            if flight is None or link.worker not in flight.legs:
                self._meter.dropped("unknown")
                continue
            if link.outstanding.compute(chunk.request):
                self._prefixes.settle(chunk.request, link.worker)
            dropped = flight.accept(chunk, now_s)
            if dropped:
                self._meter.dropped(dropped)
            if dropped in ("attempt", "choice"):
                continue
            self._progress(flight, link, chunk)

    def on_prompts(self, link: WorkerLink, chunks: Sequence[PromptChunk]) -> None:
        for chunk in chunks:
            flight = self._flights.get(RequestId(chunk.request))
            is_known = flight is not None and link.worker in flight.legs
            dropped = flight.accept_prompt(chunk) if flight is not None and is_known else "unknown"
            if dropped:
                self._meter.dropped(dropped)

    def _progress(self, flight: Flight, link: WorkerLink, chunk: TokenChunk) -> None:
        plan = flight.plan
        is_decoder = link.worker == plan.decode
        if is_decoder and plan.prefill is not None and plan.prefill in flight.legs:
            if flight.is_handed_over:
                # The sequence lives here now: whatever becomes of the prefill worker no longer matters.
                flight.phase = Phase.DECODE
                self._release(flight, flight.legs[plan.prefill])
                self.on_proven(flight.pair)
        elif is_decoder and plan.prefill is None and flight.phase is not Phase.DECODE:
            flight.phase = Phase.DECODE
            self.on_proven(flight.pair)
        if flight.is_finished and is_decoder:
            for leg in list(flight.legs.values()):
                self._release(flight, leg)

    def on_failed(self, link: WorkerLink, request: str, attempt: int, error: TandemError) -> None:
        flight = self._flights.get(RequestId(request))
        if flight is None or attempt != flight.attempt or link.worker not in flight.legs:
            self._meter.dropped("unknown")
            return
        self._release(flight, link)
        if self._is_needed(flight, link):
            flight.phase = Phase.FAILED
            flight.inbox.fail(error)

    def _is_needed(self, flight: Flight, link: WorkerLink) -> bool:
        """All but the prefill worker, once the decode worker said that it goes on and every first token is here."""
        is_prefill = link.worker == flight.plan.prefill != flight.plan.decode
        return not (is_prefill and flight.phase is Phase.DECODE and flight.has_first_tokens)

    def on_phase(self, link: WorkerLink, request: str, attempt: int, phase: str) -> None:
        flight = self._flights.get(RequestId(request))
        if flight is None or attempt != flight.attempt or link.worker not in flight.legs:
            return
        if phase == Phase.QUEUED:
            link.outstanding.acknowledge(request)
        if phase == Phase.PREFILL and flight.prefill_started_s is None:
            flight.prefill_started_s = self._clock.now_s()
        order = (Phase.QUEUED, Phase.PREFILL, Phase.TRANSFER, Phase.DECODE)
        if phase in order and flight.phase in order and order.index(flight.phase) < order.index(Phase(phase)):
            flight.phase = Phase(phase)

    def on_up(self, link: WorkerLink) -> None:
        self._table.note_up(link)
        self.on_link_up()

    def on_beat(self, link: WorkerLink) -> None:
        self._table.note_beat(link)

    def on_lost(self, link: WorkerLink, why: str) -> None:
        error = WorkerLostError(f"worker {link.worker} was lost during the request", why=why, todo="send it again")
        for request in list(link.requests):
            flight = self._flights.get(RequestId(request))
            if flight is not None and flight.legs.get(link.worker) is link:
                self._release(flight, link)
                if not flight.is_finished and self._is_needed(flight, link):
                    flight.phase = Phase.FAILED
                    flight.inbox.fail(error)
        link.requests.clear()


def job_of(work: Work, now_s: float) -> Job:
    """What the policy needs to know of `work`, planned at `now_s`."""
    return Job(
        prompt_tokens=len(work.prompt),
        max_tokens=work.sampling.max_tokens,
        choices=work.sampling.n,
        now_s=now_s,
        deadline_s=now_s + work.timeout_s,
        is_computed_whole=work.sampling.prompt_logprobs is not None,
    )
