"""A worker on virtual time: the engine's own scheduler, block space and ledger; steps take the calibration's time.

    post ──▶ inbox ──between steps──▶ role ──▶ Scheduler.plan ──▶ step ──its end──▶ commit ──▶ inbox …

While nothing but decodes runs and no request waits, every step would be planned alike: such a *stretch* is one event.
A post meanwhile cuts it at the end of the step that is in progress then.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.events import Action, EventQueue
from tandem.controlplane.simulator.reports import Reports, SimulatedLoad
from tandem.controlplane.simulator.simulated_request import SimulatedRequest, WorkerActivity
from tandem.core.block_hash import BlockHash
from tandem.core.handoff import ChoiceState
from tandem.core.ids import ChoiceIndex, WorkerId
from tandem.core.prefill_queue import FIRST_COME, QueueRules, condensed
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import FinishReason, RoleName
from tandem.engine.block_manager import BlockSpace
from tandem.engine.request import CacheEvent, EngineRequest, RequestKind
from tandem.engine.scheduler import Scheduler, StepItem, StepPlan
from tandem.engine.sequence import QueueState, RequestState
from tandem.engine.step_budget import StepPace
from tandem.workercore.load_meter import DecodePace

ROOT = BlockHash(b"simulated-prefix")
MAX_STRETCH_S = 1.0
"""Reports show free blocks as of the last step that was committed: never older than this."""
_SETTLED = 16  # so many equal measurements, and a moving average has their value


class WorkerRole(Protocol):
    """Hooks around steps; called between them, never inside."""

    def before_step(self) -> None: ...

    def began(self, flight: SimulatedRequest) -> None:
        """The first chunk of a PREFILL_ONLY request is computed from now on."""

    def computed(self, flight: SimulatedRequest, started_s: float) -> None:
        """A step that began at `started_s` has computed more of a PREFILL_ONLY request's prompt."""

    def first_token(self, flight: SimulatedRequest) -> None:
        """A PREFILL_ONLY request has its first token and is parked."""

    def decoded(self, flight: SimulatedRequest) -> None:
        """A request has its first token from this worker, which will make all others too."""

    def finished(self, flight: SimulatedRequest) -> None:
        """A request has all its tokens and is gone from the scheduler."""


@dataclass(slots=True)
class _SimulatedStep:
    """`count` equal steps, each `step_s` long, planned at once."""

    plan: StepPlan
    started_s: float
    step_s: float
    count: int


class VirtualWorker:
    """One worker. `publish` gets the block events of every turn; `role` must be set before the first `post`."""

    role: WorkerRole

    def __init__(
        self, worker: WorkerId, role_name: RoleName, calibration: Calibration, events: EventQueue,
        publish: Callable[[Sequence[CacheEvent]], None], queue: QueueRules = FIRST_COME,
    ) -> None:  # fmt: skip
        self.worker, self.role_name, self.calibration = worker, role_name, calibration
        self._events, self._publish, self._queue_rules = events, publish, queue
        self.space = BlockSpace(calibration.layout(), [calibration.blocks], events)
        config = dataclasses.replace(calibration.scheduler, queue=queue)
        self._pace = StepPace(config, calibration.block_tokens)
        self.scheduler = Scheduler(self.space, config, self._pace, max_scored_tokens=0)
        self.flights: dict[str, SimulatedRequest] = {}
        self.done = WorkerActivity(worker=worker, role=role_name.value)
        self._decoding = DecodePace()
        self._arrivals = 0
        self._inbox: deque[Action] = deque()
        self._step: _SimulatedStep | None = None
        self._generation = 0
        self._is_turning = False
        self.reports = Reports(self.load())

    # ---- from outside ----------------------------------------------------------------------------------------------

    def post(self, action: Action) -> None:
        """Run `action` between two steps: now if none is in progress, else when the one in progress ends."""
        self._inbox.append(action)
        if self._step is not None:
            self._cut(self._step)
        elif not self._is_turning:
            self._turn()

    def add(self, flight: SimulatedRequest, kind: RequestKind) -> None:
        """Queue a request. To be called from an action."""
        flight.state = self._new_state(flight, kind, (), flight.received_s)
        self.scheduler.add(flight.state)

    def new_decoding(self, flight: SimulatedRequest) -> RequestState:
        """Return a request with prompt and first token from elsewhere; for `BlockSpace.adopt` and `add_running`."""
        first = ChoiceState(choice=ChoiceIndex(0), tokens=(flight.number,))
        state = self._new_state(flight, RequestKind.FULL, (first,), flight.announced_s)
        state.cached_tokens = 0
        return state

    def load(self) -> SimulatedLoad:
        """Return the content of a report now."""
        load, ledger = self.scheduler.load(self._events.now_s()), self.space.ledgers[0]
        return SimulatedLoad(
            queued_requests=load.queued_requests,
            queued_tokens=load.queued_tokens,
            queue=tuple(condensed(load.queue)),
            queue_rules=self._queue_rules,
            in_flight=len(self.flights),
            decoding_sequences=load.decoding_sequences,
            free_blocks=ledger.available,
            total_blocks=ledger.num_blocks,
            prefill_speed=self._pace.prefill_speed,
            decode_step_s=self._decoding.step_s,
            decode_sequence_s=self._decoding.sequence_s,
            prefill_step_s=self.done.prefill_step_s,
        )

    # ---- a turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Run everything between two steps, then the next step if there is anything to do."""
        self._is_turning = True
        while self._inbox:
            self._inbox.popleft()()
        self.role.before_step()
        if self.scheduler.has_work:
            self._plan()
        self._is_turning = False
        events = self.space.take_events()
        if events:
            self._publish(events)
        step = self._step
        is_stretching = step is not None and step.count > 1
        self.reports.turn(self._events.now_s(), self.load, is_stepping=step is not None, is_stretching=is_stretching)

    def _plan(self) -> None:
        plan = self._planned()
        if plan.preempted and not plan.items:  # their blocks are there for a waiting request
            plan = self._planned()
        if plan.items:
            self._begin(plan)

    def _planned(self) -> StepPlan:
        plan = self.scheduler.plan(self._events.now_s())
        for key in plan.preempted:
            self.flights[key].preemptions += 1
        for key, cached_tokens in plan.admitted.items():  # their first chunk may come later
            self.flights[key].cached_tokens = cached_tokens
        return plan

    def _begin(self, plan: StepPlan) -> None:
        now_s = self._events.now_s()
        count = self._stretch(plan)
        step_s = self._step_s(plan, count)
        if count > 1 and step_s > 0:
            count = max(1, min(count, int(MAX_STRETCH_S / step_s)))
        self._step = _SimulatedStep(plan, now_s, step_s, count)
        self._schedule(self._step)
        for item in plan.items[plan.decode_tokens :]:
            flight = self.flights[item.state.request.key]
            if flight.started_s is None:
                flight.started_s = now_s
                flight.computed_tokens = item.start
                if item.state.is_prefill_only:
                    self.role.began(flight)

    def _schedule(self, step: _SimulatedStep) -> None:
        self._generation += 1
        # A cut may end now, and rounding must not put it before.
        end_s = max(self._events.now_s(), step.started_s + step.count * step.step_s)
        self._events.at(end_s, partial(self._end, self._generation))

    def _cut(self, step: _SimulatedStep) -> None:
        """Let a stretch end with the step that is in progress now."""
        if step.count > 1 and step.step_s > 0:
            passed = int((self._events.now_s() - step.started_s) / step.step_s) + 1
            if passed < step.count:
                step.count = passed
                self._schedule(step)

    def _stretch(self, plan: StepPlan) -> int:
        """Return for how many steps the scheduler would plan the same decodes again, as far as is known now."""
        scheduler, items = self.scheduler, plan.items
        if plan.prefill_tokens or plan.preempted or len(items) != scheduler.running_sequences:
            return 1
        if any(state.place is QueueState.WAITING for state in scheduler.states()):
            return 1
        if any(self.flights[item.state.request.key].decoded_s is None for item in items):
            return 1
        count = min(i.state.request.sampling.max_tokens - len(i.sequence.outputs) for i in items)
        size, available = self.space.block_tokens, self.space.ledgers[0].available
        while count > 1:
            grow = sum(max(0, -(-(i.end + count - 1) // size) - len(i.sequence.tables[0])) for i in items)
            if grow <= available:
                break
            count //= 2
        return max(1, count)

    def _step_s(self, plan: StepPlan, count: int) -> float:
        """Return seconds of each of `count` steps; contexts grow by a token a step, so the middle one stands for all.

        As the sim engine's runner, every sequence of one token is a decode, all others are chunks."""
        decodes, context, chunks = 0, 0.0, []
        for item in plan.items:
            if item.end - item.start == 1:
                decodes += 1
                context += item.end
            else:
                chunks.append((item.start, item.end))
        return self.calibration.step_s(chunks, decodes, context + decodes * (count - 1) / 2)

    # ---- the end of a step -----------------------------------------------------------------------------------------

    def _end(self, generation: int) -> None:
        step = self._step
        if step is None or generation != self._generation:
            return  # it was cut shorter
        self._step = None
        self._is_turning = True  # posts from here on wait for the turn
        self._measure(step)
        for item in step.plan.items:
            if item.state.place is not QueueState.GONE:
                self._commit(item, step)
        self._turn()

    def _commit(self, item: StepItem, step: _SimulatedStep) -> None:
        """Do what `Engine._commit` and `_settle` do with a request of one choice."""
        state, sequence, more = item.state, item.sequence, step.count - 1
        if more and self.space.extend(state, sequence, item.end + more) is None:
            raise RuntimeError(f"worker {self.worker} has too few blocks for the stretch that it planned")
        flight = self.flights[state.request.key]
        sequence.computed = item.end + more
        if item.sampling_choices:
            sequence.outputs.extend([flight.number] * (more + 1))
            sequence.has_sampled = True
            state.is_preempted = False
        self.space.publish(state, sequence)
        if state.is_prefill_only:
            flight.computed_tokens = item.end
            self.role.computed(flight, step.started_s)
        if item.sampling_choices:
            self._settle(flight, state)

    def _settle(self, flight: SimulatedRequest, state: RequestState) -> None:
        """Handle a request's new token: park or end it."""
        sequence = state.leader
        if len(sequence.outputs) >= state.request.sampling.max_tokens:
            sequence.finish = FinishReason.LENGTH
            state.live.remove(sequence)
        if state.is_prefill_only:
            self.scheduler.park(state)
            self.role.first_token(flight)
            return
        if flight.decoded_s is None:
            flight.decoded_s = self._events.now_s()
            self.role.decoded(flight)
        if not state.live:
            self.scheduler.remove(state)
            self.done.requests += 1
            self.role.finished(flight)

    def _measure(self, step: _SimulatedStep) -> None:
        plan, count, step_s = step.plan, step.count, step.step_s
        if step_s > 0:
            if plan.decode_tokens and not plan.prefill_tokens:
                for _ in range(count):
                    self._decoding.observe(plan.decode_tokens, step_s)
            for _ in range(min(count, _SETTLED)):
                self._pace.observe(plan.prefill_tokens, plan.decode_tokens, step_s, plan.prefill_attended)
        self.done.steps += count
        self.done.busy_s += count * step_s
        self.done.prefill_step_s += step_s if plan.prefill_tokens else 0.0
        self.done.prefill_tokens += plan.prefill_tokens
        self.done.decode_tokens += plan.decode_tokens * count

    def _new_state(
        self, flight: SimulatedRequest, kind: RequestKind, outputs: tuple[ChoiceState, ...], arrival_s: float
    ) -> RequestState:
        """Make a state as the engine does. The prompt's tokens are unknown and not needed: its block hashes are
        given."""
        self._arrivals += 1
        request = EngineRequest(
            key=flight.key,
            prompt=(0,) * flight.request.prompt_tokens,
            sampling=SamplingParams(max_tokens=flight.request.output_tokens, temperature=0.0),
            hash_root=ROOT,
            kind=kind,
            arrival_s=arrival_s,
        )
        state = RequestState(request, outputs, (arrival_s, self._arrivals), len(self.space.ledgers))
        state.leader.hashes = list(flight.hashes)
        return state
