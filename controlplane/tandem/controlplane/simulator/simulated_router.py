"""A router on virtual time: the real policy over the real block table; its knowledge of load is as old as in a cluster.

It adds its own dispatches at once and learns of everything else through reports (every 100 ms) and block events.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tandem.controlplane.simulator.events import EventQueue
from tandem.controlplane.simulator.reports import SimulatedLoad
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulated_request import SimulatedRequest
from tandem.controlplane.simulator.traces import TraceRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.block_hash import BlockHash
from tandem.core.config import AdmissionSection
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, WorkerId
from tandem.core.kv_compatibility import KVProfile
from tandem.core.state_enums import RoleName
from tandem.engine.request import CacheEvent
from tandem.router.admission.admission_controller import (
    ANSWER_TOKENS,
    POLL_S,
    AdmissionController,
    CapacityCheck,
    QueuedRequest,
)
from tandem.router.routing.cost_model import with_sources
from tandem.router.routing.observed_traffic import (
    AnswerLengths,
    ComputingShare,
    InFlightWork,
    Outstanding,
    Popularity,
    sent,
)
from tandem.router.routing.plan import Candidate, Job, Plan, has_choice
from tandem.statestore.index.block_table import BlockTable
from tandem.statestore.index.replica import DEFAULT_MAX_BYTES
from tandem.statestore.index.speculation import Holder, Speculation

INDEX_DELAY_S = 0.02
"""From the end of a step to a router's table: the host's batch, Redis, the router's read."""
TOLD_S = 0.002
"""From one router's dispatch until another router knows of it."""
_INCARNATION = Incarnation(1)  # no worker starts anew here
_JUST_BEFORE_S = 1e-9
_MAX_WAITING = 1 << 40


@dataclass(frozen=True, slots=True)
class _Facts:
    role: RoleName
    block_tokens: int


@dataclass(slots=True)
class _WorkerView:
    """A router's knowledge of one worker: the last report, and the requests sent since."""

    worker: VirtualWorker
    bit: int
    facts: _Facts | None
    """None = it is being drained, or changes its role."""
    load: SimulatedLoad = field(default_factory=SimulatedLoad)
    reported_s: float = float("-inf")
    outstanding: Outstanding = field(default_factory=Outstanding)
    computing: ComputingShare = field(default_factory=ComputingShare)
    last_used: int = 0
    plain: Candidate | None = None
    """The last one made for a prompt with no block held there, while `plain_of` stays as it was."""
    plain_of: tuple[int, bool, int] = (0, False, 0)
    plain_load: SimulatedLoad | None = None


class SimulatedRouter:
    """One router over all workers; `others` are notified of its dispatches."""

    others: Sequence[SimulatedRouter] = ()

    def __init__(self, workers: Sequence[VirtualWorker], setup: Setup, events: EventQueue) -> None:
        self._events, self._setup, self._calibration = events, setup, setup.calibration
        self._table = BlockTable(DEFAULT_MAX_BYTES)
        self._speculation, self._popularity = Speculation(events), Popularity(events)
        self._lengths = AnswerLengths()
        self._known: dict[WorkerId, _WorkerView] = {}
        self._itl_s = min((one.itl_s for one in setup.promises.values() if one.itl_s), default=math.inf)
        self._ttft_s = min((one.ttft_s for one in setup.promises.values() if one.ttft_s), default=math.inf)
        self._uses = 0
        self._read_s = -math.inf
        # A worker that does not report its KV layout is never fetched from.
        profile = KVProfile(fingerprint="simulated", identity=(), layout=setup.calibration.layout())
        self._profile = profile if setup.is_fetching else None
        for worker in workers:
            bit = self._table.open_slot()
            self._table.go_live(bit, worker.worker)
            facts = _Facts(worker.role_name, setup.calibration.block_tokens)
            self._known[worker.worker] = _WorkerView(worker, bit, facts)
        self._admission = None if setup.admission is None else self._new_admission(setup.admission)

    def admit(self, request: TraceRequest, hashes: Sequence[BlockHash], go: Callable[[], None]) -> None:
        """Admit a request: `go` is called when it may be planned and sent off, at once or later."""
        if self._admission is None:
            go()
            return
        job = self.job(request)
        self._admission.enter(
            QueuedRequest(
                prompt_tokens=job.prompt_tokens,
                choices=1,
                cost=job.prompt_tokens + min(job.max_tokens, ANSWER_TOKENS),
                arrived_s=job.now_s,
                grant=go,
                refuse=_refused,
                compute_time=lambda: self._compute_s(request, hashes),
                alone=partial(self._alone, request, hashes),
            )
        )

    def job(self, request: TraceRequest) -> Job:
        """Return the router's knowledge of a request that it has received now."""
        max_tokens = request.output_tokens if self._setup.max_tokens is None else self._setup.max_tokens
        return Job(
            prompt_tokens=request.prompt_tokens,
            max_tokens=max_tokens,
            now_s=self._events.now_s(),
            waiting=0 if self._admission is None else self._admission.waiting,
            answer_tokens=self._lengths.mean(""),
            promised_ttft_s=self._ttft_s,
            waited_s=self._events.now_s() - request.arrival_s,
            itl_s=self._itl_s,
        )

    def plan(self, request: TraceRequest, hashes: Sequence[BlockHash], waiting: int | None = None) -> Plan:
        """Return the policy's plan for the candidates as this router sees them now."""
        held, expected = self._table.lookup(hashes), self._speculation.lookup(hashes)
        followers = self._popularity.followers(_shared(hashes, held, expected))
        job = dataclasses.replace(self.job(request), followers=followers)
        if waiting is not None:
            job = dataclasses.replace(job, waiting=waiting)
        self._read_all(job.now_s)
        candidates = [
            self._candidate(known, job, held.get(name, 0), expected.get((name, _INCARNATION), 0))
            for name, known in self._known.items()
            if known.facts is not None
        ]
        return with_sources(self._setup.policy.plan(job, candidates), job, candidates)

    def sent(self, flight: SimulatedRequest) -> None:
        """Record a dispatch; the next plan counts it, and its blocks as held where they will be computed."""
        plan = flight.plan
        if plan.prefill is not None:
            decode = self._use(flight.decode)
            decode.outstanding.add(flight.key, self._sent(flight, decode, plan.decode_hit_tokens, None))
        computing = self._use(flight.prefill)
        known_tokens = max([plan.prefill_hit_tokens, *(source.tokens for source in plan.sources[:1])])
        computing.outstanding.add(flight.key, self._sent(flight, computing, plan.prefill_hit_tokens, known_tokens))
        hashes = flight.hashes
        self._popularity.count(_shared(hashes, self._table.lookup(hashes), self._speculation.lookup(hashes)))
        self._expect(flight)
        for other in self.others:
            self._events.after(TOLD_S, partial(other._expect, flight))

    # ---- arrivals ----------------------------------------------------------------------------------------------------

    def published(self, worker: WorkerId, events: Sequence[CacheEvent]) -> None:
        """Take in a worker's block events; the table has them a little later."""
        self._events.after(INDEX_DELAY_S, partial(self._learn, worker, events))

    def queued(self, flight: SimulatedRequest, worker: WorkerId) -> None:
        """Record that the worker has it: its reports count it from now on."""
        known = self._known[worker]
        self._read(known, self._events.now_s() - self._calibration.rpc_s - _JUST_BEFORE_S)
        known.outstanding.acknowledge(flight.key)

    def computed(self, flight: SimulatedRequest) -> None:
        """Handle the first token."""
        if self._known[flight.prefill].outstanding.compute(flight.key):
            self._settle(flight)
            if flight.decode != flight.prefill:
                self._known[flight.decode].outstanding.depart(flight.key)
            for other in self.others:
                self._events.after(TOLD_S, partial(other._settle, flight))

    def handed_over(self, flight: SimulatedRequest) -> None:
        """Handle the decode worker's first token: the prefill worker has no more work with it."""
        self._known[flight.prefill].outstanding.end(flight.key)
        self._known[flight.decode].outstanding.compute(flight.key)

    def finished(self, flight: SimulatedRequest) -> None:
        """Handle the last token."""
        for worker in (flight.prefill, flight.decode):
            self._known[worker].outstanding.end(flight.key)
        self._lengths.ended("", flight.request.output_tokens)

    # ---- workers that change ---------------------------------------------------------------------------------------

    def drain(self, worker: WorkerId) -> None:
        """Send nothing new there."""
        self._known[worker].facts = None

    def in_flight(self, worker: WorkerId) -> int:
        """Return the number of requests sent there that have not ended."""
        return len(self._known[worker].outstanding)

    def join(self, worker: WorkerId) -> None:
        """Let it take work, in the role that it has now."""
        known = self._known[worker]
        known.facts, known.plain = _Facts(known.worker.role_name, self._calibration.block_tokens), None

    def _expect(self, flight: SimulatedRequest) -> None:
        self._speculation.expect(flight.key, flight.prefill, _INCARNATION, flight.hashes)

    def _settle(self, flight: SimulatedRequest) -> None:
        self._speculation.settle(flight.key, flight.prefill)

    # ---- queued requests ---------------------------------------------------------------------------------------------

    def _new_admission(self, rules: AdmissionSection) -> AdmissionController:
        room = CapacityCheck(rules, lambda: self._itl_s)

        def has_room(_: str, request: QueuedRequest) -> bool:
            now_s = self._events.now_s()
            self._read_all(now_s)
            return room.is_there(request, self._known.values(), now_s)

        def has_place(worker: WorkerId, request: QueuedRequest) -> bool:
            return room.is_there_whole(request, self._known[worker], self._events.now_s())

        patient = dataclasses.replace(rules, max_waiting=_MAX_WAITING)
        return AdmissionController(patient, self._events, has_room, _Uncounted(), self._pump_soon, has_place=has_place)

    def _pump_soon(self) -> None:
        self._events.after(POLL_S, self._pump)

    def _pump(self) -> None:
        if self._admission is not None:
            self._admission.pump()
            if self._admission.waiting:
                self._pump_soon()

    def _alone(self, request: TraceRequest, hashes: Sequence[BlockHash], waiting: int) -> WorkerId | None:
        """Return the best single worker, as router.flights.dispatch does."""
        if not has_choice(known.worker.role_name for known in self._known.values() if known.facts is not None):
            return None
        plan = self.plan(request, hashes, waiting)
        is_alone = plan.prefill is None and self._known[plan.decode].worker.role_name is not RoleName.MIXED
        return plan.decode if is_alone else None

    def _compute_s(self, request: TraceRequest, hashes: Sequence[BlockHash]) -> float:
        cost = self.plan(request, hashes).cost
        return cost.compute_s if cost is not None else 0.0

    # ---- state -------------------------------------------------------------------------------------------------------

    def _candidate(self, known: _WorkerView, job: Job, held: int, expected: int) -> Candidate:
        """Make a candidate as router.workers.prefix and .table do."""
        now_s, worker, size = job.now_s, known.worker, self._calibration.block_tokens
        load, outstanding = known.load, known.outstanding
        is_stale = outstanding.is_stale(now_s)
        is_plain, state = not (held or expected), (outstanding.changes, is_stale, known.last_used)
        if is_plain and known.plain is not None and known.plain_load is load and known.plain_of == state:
            return known.plain
        sent, queue = outstanding.uncounted(now_s), outstanding.queue(now_s)
        made = Candidate(
            worker=worker.worker,
            incarnation=_INCARNATION,
            role=worker.role_name,
            queued_tokens=(0 if is_stale else load.queued_tokens) + sum(work.tokens for work in queue),
            queued_requests=(0 if is_stale else load.queued_requests) + len(queue),
            queue=queue if is_stale else (*load.queue, *queue),
            rules=self._setup.queue,
            in_flight=(0 if is_stale else load.in_flight) + len(sent),
            running=0 if is_stale else load.decoding_sequences,
            held_tokens=held * size,
            reusable_tokens=min(max(held, expected), (job.prompt_tokens - 1) // size) * size,
            free_blocks=max(0, load.free_blocks - sum(one.blocks for one in sent)),
            total_blocks=load.total_blocks,
            last_used=known.last_used,
            prefill_speed=load.prefill_speed,
            decode_step_s=load.decode_step_s,
            decode_sequence_s=load.decode_sequence_s,
            computing=0.0 if is_stale else known.computing.share,
            tokens_in_transfer=outstanding.tokens_in_transfer,
            profile=self._profile,
            link_speed=self._link_speed,
        )
        if is_plain:
            known.plain, known.plain_of, known.plain_load = made, state, load
        return made

    def _read_all(self, now_s: float) -> None:
        """Take in all reports that have come by now. They take `rpc_s`, so that a moment's are read once."""
        if now_s == self._read_s and self._calibration.rpc_s:
            return
        self._read_s = now_s
        for known in self._known.values():
            self._read(known, now_s - self._calibration.rpc_s)

    def _read(self, known: _WorkerView, sent_by_s: float) -> None:
        """Take in the report that has come by now, if there is a new one."""
        sent_s, known.load = known.worker.reports.seen(sent_by_s)
        if sent_s > known.reported_s:
            known.reported_s = sent_s
            known.outstanding.report(sent_s + self._calibration.rpc_s)
            known.computing.report(sent_s, known.load.prefill_step_s)

    def _use(self, worker: WorkerId) -> _WorkerView:
        known = self._known[worker]
        self._uses += 1
        known.last_used = self._uses
        return known

    def _sent(
        self, flight: SimulatedRequest, known: _WorkerView, held_tokens: int, known_tokens: int | None
    ) -> InFlightWork:
        plan = flight.plan
        return sent(
            self.job(flight.request),
            held_tokens=held_tokens,
            known_tokens=known_tokens,
            block_tokens=self._calibration.block_tokens,
            rules=self._setup.queue,
            speed=known.load.prefill_speed,
            moved_tokens=0 if plan.prefill is None else flight.request.prompt_tokens - plan.decode_hit_tokens,
        )

    def _learn(self, worker: WorkerId, events: Sequence[CacheEvent]) -> None:
        bit, table = self._known[worker].bit, self._table
        for event in events:
            block = ((int(event.group), event.hash),)
            if event.is_stored:
                table.add(bit, block)
            else:
                table.remove(bit, block)

    def _link_speed(self, _: WorkerId) -> float:
        return self._calibration.link_bytes_per_s


class _Uncounted:
    """An `AdmissionMeter` that counts nothing: every request's record has its wait."""

    def waited(self, seconds: float) -> None: ...

    def refused(self, reason: str) -> None: ...


def _refused(error: TandemError) -> None:
    raise RuntimeError("a request without a deadline was refused") from error


def _shared(hashes: Sequence[BlockHash], held: Mapping[WorkerId, int], expected: Mapping[Holder, int]) -> bytes:
    """Return the deepest block that any worker holds or is expected to, as router.workers.prefix finds it."""
    deepest = max((*held.values(), *expected.values()), default=0)
    return hashes[deepest - 1] if deepest else b""
