"""Workers that change their roles on virtual time, and the planner that decides on it.

    drain: routers send nothing new ──▶ all that went there has ended ──▶ `flip_s` ──▶ the other role, with its cache

Decisions come from `cluster.planner`, with a controller's input: requests as they come and end, and workers' reports.
A drain waits for answers to end: no decode moves to another worker here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.controlplane.planner.observer import MeasuredRates, RecentRequests
from tandem.controlplane.planner.planner import Planner
from tandem.controlplane.planner.records import Decision, Observation, RoleSplit, Rules
from tandem.controlplane.simulator.events import EventQueue
from tandem.controlplane.simulator.planner_rates import known
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulated_request import SimulatedRequest
from tandem.controlplane.simulator.simulated_router import SimulatedRouter
from tandem.controlplane.simulator.traces import TraceRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.demand import WorkerSeen
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName

LOOK_S = 0.02
"""Interval of the checks for a drained worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A finished flip: when it began to drain, was drained, and took work again."""

    worker: WorkerId
    before: RoleName
    after: RoleName
    asked_s: float
    drained_s: float
    ready_s: float


class RoleChanger:
    """Flips workers. `turn` gives a drained worker its new role."""

    def __init__(
        self,
        workers: Mapping[WorkerId, VirtualWorker],
        fronts: Sequence[SimulatedRouter],
        events: EventQueue,
        turn: Callable[[VirtualWorker, RoleName], None],
        flip_s: float,
    ) -> None:
        self._workers, self._fronts, self._events = workers, fronts, events
        self._turn, self._flip_s = turn, flip_s
        self._wished = {name: worker.role_name for name, worker in workers.items()}
        self._flipping: set[WorkerId] = set()
        self.done: list[Flip] = []

    @property
    def split(self) -> RoleSplit:
        """Return the desired split: a flipping worker counts with its new role."""
        roles = list(self._wished.values())
        return RoleSplit(roles.count(RoleName.PREFILL), roles.count(RoleName.DECODE), roles.count(RoleName.MIXED))

    @property
    def is_settled(self) -> bool:
        return not self._flipping

    def go_to(self, wanted: RoleSplit) -> None:
        """Flip as few workers as lead there, those with the least load first. `wanted` has as many workers."""
        while (current := self.split) != wanted:
            before = max(RoleName, key=lambda role: current.of(role) - wanted.of(role))
            after = min(RoleName, key=lambda role: current.of(role) - wanted.of(role))
            if current.total != wanted.total:
                raise ValueError(f"{current} cannot become {wanted} by flips")
            able = [name for name, role in self._wished.items() if role is before and name not in self._flipping]
            self.flip(min(able, key=lambda name: (self._in_flight(name), name)), after)

    def flip(self, name: WorkerId, role: RoleName) -> None:
        """Drain this worker, then let it take up the other role."""
        self._flipping.add(name)
        self._wished[name] = role
        for front in self._fronts:
            front.drain(name)
        self._look(name, self._events.now_s())

    def _look(self, name: WorkerId, asked_s: float) -> None:
        worker = self._workers[name]
        counts = worker.space.ledgers[0].counts()
        if self._in_flight(name) or worker.flights or counts.request or counts.reserved or counts.pushing:
            self._events.after(LOOK_S, partial(self._look, name, asked_s))
            return
        self._events.after(self._flip_s, partial(self._ready, name, asked_s, self._events.now_s()))

    def _ready(self, name: WorkerId, asked_s: float, drained_s: float) -> None:
        worker, after = self._workers[name], self._wished[name]
        before = worker.role_name
        self._turn(worker, after)
        for front in self._fronts:
            front.join(name)
        self._flipping.remove(name)
        now_s = self._events.now_s()
        flip = Flip(worker=name, before=before, after=after, asked_s=asked_s, drained_s=drained_s, ready_s=now_s)
        self.done.append(flip)

    def _in_flight(self, name: WorkerId) -> int:
        return sum(front.in_flight(name) for front in self._fronts)


class PlannerLoop:
    """Asks the planner every `plan_every_s` while `is_going()`, and has its decisions carried out."""

    def __init__(
        self,
        setup: Setup,
        rules: Rules,
        workers: Mapping[WorkerId, VirtualWorker],
        steering: RoleChanger,
        events: EventQueue,
        is_going: Callable[[], bool],
    ) -> None:
        self._setup, self._workers, self._steering, self._events = setup, workers, steering, events
        self._is_going = is_going
        self._planner = Planner(rules)
        self._recent = RecentRequests(rules.window_s)
        self._rates = MeasuredRates(known(setup.calibration, setup.queue))
        self.decisions: list[Decision] = []
        events.after(setup.plan_every_s, self._decide)

    def came(self, number: int, request: TraceRequest) -> None:
        self._recent.came(str(number), self._events.now_s(), request.prompt_tokens)

    def started(self, flight: SimulatedRequest) -> None:
        self._recent.started(flight.key, flight.cached_tokens)

    def ended(self, flight: SimulatedRequest) -> None:
        self._recent.ended(flight.key, flight.request.output_tokens)

    def _decide(self) -> None:
        now_s = self._events.now_s()
        self._rates.note(self._report(worker) for worker in self._workers.values())
        for worker in self._workers.values():
            for state in worker.scheduler.states():
                self._recent.progressed(state.request.key, len(state.leader.outputs))
        observation = Observation(
            split=self._steering.split, recent=self._recent.seen(), rates=self._rates.rates,
            promises=self._setup.promises, is_settled=self._steering.is_settled,
        )  # fmt: skip
        decision = self._planner.decide(observation, now_s)
        self.decisions.append(decision)
        if decision.is_to_act:
            self._steering.go_to(decision.wanted)
        if self._is_going():
            self._events.after(self._setup.plan_every_s, self._decide)

    def _report(self, worker: VirtualWorker) -> WorkerSeen:
        load = worker.load()
        return WorkerSeen(
            worker=worker.worker, role=worker.role_name, prefill_speed=load.prefill_speed,
            decoding_sequences=load.decoding_sequences, decode_step_s=load.decode_step_s,
            decode_sequence_s=load.decode_sequence_s,
        )  # fmt: skip
