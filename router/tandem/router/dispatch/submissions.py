"""The parts of a request that workers have: sends them off, lets go of them, takes them back. Decides nothing."""

from __future__ import annotations

from tandem.core.errors import TandemError, UnavailableError
from tandem.core.ids import Attempt, WorkerId
from tandem.core.state_enums import WorkerState
from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.routing.observed_traffic import HotPrefixes, InFlightWork, sent
from tandem.router.routing.plan import Job, Plan
from tandem.router.workers import proto_convert
from tandem.router.workers.connection import WorkerLink
from tandem.router.workers.prefix_lookup import PrefixFinder, PrefixView
from tandem.router.workers.proto_convert import Leg, SamplingMessage, WorkerFacts
from tandem.router.workers.table import WorkerTable


class NotSentError(Exception):
    """A worker did not take its leg: `link` is its, `error` gives the reason."""

    def __init__(self, link: WorkerLink, error: TandemError) -> None:
        self.link, self.error = link, error
        super().__init__(error.message)


class Submitter:
    """Between flights and links. Runs on the event loop."""

    def __init__(self, table: WorkerTable, prefixes: PrefixFinder, hot: HotPrefixes) -> None:
        self._table, self._prefixes, self._hot = table, prefixes, hot

    def send(self, flight: InFlightRequest, view: PrefixView, now_s: float) -> None:
        """Send the flight's attempt to the workers of its plan, each with what is left of its time.

        Raises UnavailableError before anything is sent if one of them is not connected, NotSentError later.
        """
        plan = flight.plan
        decode = self._connected(plan.decode)
        prefill = None if plan.prefill is None else self._connected(plan.prefill)
        flight.pair = ()
        sampling, job = proto_convert.sampling_to_wire(flight.sampling), flight.job(now_s)
        if prefill is None:
            self._send_leg(flight, decode, None, Leg.FULL, sampling, view, job)
            return
        # The announcement first: the prefill worker may ask for its ticket at once.
        self._send_leg(flight, decode, prefill, Leg.DECODE, sampling, view, job)
        self._send_leg(flight, prefill, decode, Leg.PREFILL, sampling, view, job)

    def release(self, flight: InFlightRequest, link: WorkerLink) -> None:
        """Nothing more is expected from there."""
        flight.legs.pop(link.worker, None)
        link.requests.discard(flight.id)
        link.outstanding.end(flight.id)
        self._prefixes.withdraw(flight.id, link.worker)

    def cancel(self, flight: InFlightRequest, attempt: Attempt, reason: str) -> None:
        """Cancel this attempt at every worker that may still hold something of it."""
        for link in list(flight.legs.values()):
            self.release(flight, link)
            if link.is_up:
                try:
                    link.send(proto_convert.cancel(flight.id, attempt, reason))
                except TandemError:
                    continue  # it does not read any more; its lease decides

    def _send_leg(
        self,
        flight: InFlightRequest,
        link: WorkerLink,
        peer: WorkerLink | None,
        leg: Leg,
        sampling: SamplingMessage,
        view: PrefixView,
        job: Job,
    ) -> None:
        work = flight.work
        sources = self._sources(flight.plan) if leg is not Leg.DECODE else []
        salt = work.salt or self._prefixes.salt
        try:
            link.send(
                proto_convert.submit(
                    request=flight.id,
                    attempt=flight.attempt,
                    leg=leg,
                    prompt=work.prompt,
                    sampling=sampling,
                    salt=salt,
                    last_block_hash=view.last_hashes.get(link.worker, b""),
                    timeout_s=max(0.001, flight.deadline_s - job.now_s),
                    peer=peer.facts if peer is not None else None,
                    sources=sources,
                    forced=flight.forced(),
                    trace=work.trace_id,
                )
            )
        except TandemError as error:
            raise NotSentError(link, error) from error
        flight.legs[link.worker] = link
        flight.pair += ((link.worker, link.where.incarnation),)
        link.requests.add(flight.id)
        if leg is not Leg.DECODE and link.facts is not None:
            known = max([view.reusable_tokens.get(link.worker, 0), *(tokens for _, tokens in sources[:1])])
            self._prefixes.expect(flight.id, link.facts, view, is_asked_for=not flight.is_probe)
            if not flight.is_probe:
                self._hot.note(view.shared, work.prompt, view.shared_tokens, salt, link.facts.model, view.followers)
            flight.predict(known, link.facts.block_tokens, is_hoped=view.expected_tokens.get(link.worker, 0) > 0)
        link.outstanding.add(flight.id, self._sent(flight, link, leg, view, job))
        self._table.note_use(link)

    def _sent(self, flight: InFlightRequest, link: WorkerLink, leg: Leg, view: PrefixView, job: Job) -> InFlightWork:
        """The load that this leg adds to the worker, until its load reports include it."""
        known = max([view.reusable_tokens.get(link.worker, 0), *(s.tokens for s in flight.plan.sources[:1])])
        # Blocks that a decode worker pins in place of reserving are in the form in which this pair moves blocks.
        held = flight.plan.decode_hit_tokens if leg is Leg.DECODE else view.held_tokens.get(link.worker, 0)
        return sent(
            job,
            held_tokens=held,
            known_tokens=None if leg is Leg.DECODE else known,
            block_tokens=link.facts.block_tokens if link.facts is not None else 1,
            rules=link.load.queue_rules,
            speed=link.load.prefill_speed,
            moved_tokens=_moved_tokens(flight),
        )

    def _sources(self, plan: Plan) -> list[tuple[WorkerFacts, int]]:
        """Those of the plan's sources that are here, as the worker that fetches must address them."""
        links = [(self._table.link(source.worker), source.tokens) for source in plan.sources]
        return [(link.facts, tokens) for link, tokens in links if link is not None and link.facts is not None]

    def _connected(self, worker: WorkerId) -> WorkerLink:
        link = self._table.link(worker)
        if link is None or not link.is_up:
            raise UnavailableError(f"worker {worker} is not connected", todo="try again")
        if link.state is not WorkerState.READY:  # it was promised that nothing more comes
            raise UnavailableError(f"worker {worker} takes no new work", why=f"it is {link.state}", todo="try again")
        return link


def _moved_tokens(flight: InFlightRequest) -> int:
    """Prompt tokens that go over the wire by the flight's plan."""
    plan = flight.plan
    if plan.prefill is None:
        return 0
    return max(0, len(flight.work.prompt) + flight.replayed_tokens - plan.decode_hit_tokens)
