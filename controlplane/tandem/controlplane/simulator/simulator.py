"""Plays a trace to a cluster on virtual time, and records the outcome of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.controlplane.planner.records import Decision
from tandem.controlplane.simulator.events import EventQueue
from tandem.controlplane.simulator.handoff import DecodeSide, PrefillSide, SimulatedNetwork, WholeSide, Wires
from tandem.controlplane.simulator.prefix_fetch import Fetches
from tandem.controlplane.simulator.role_changes import Flip, PlannerLoop, RoleChanger
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulated_request import Record, SimulatedRequest, WorkerActivity, record
from tandem.controlplane.simulator.simulated_router import SimulatedRouter
from tandem.controlplane.simulator.traces import BlockNames, RequestLog, TraceRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.block_hash import BlockHash
from tandem.core.errors import ConfigError
from tandem.core.ids import WorkerId
from tandem.core.state_enums import RoleName
from tandem.engine.request import CacheEvent, RequestKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one run. `records` are in the order of arrival; `waiting` had no first token when the last one arrived.
    `work` has every worker's first role; `flips` and `decisions` are in the order of their ends."""

    trace: RequestLog
    records: tuple[Record, ...]
    work: tuple[WorkerActivity, ...]
    ended_s: float
    waiting: int
    events: int
    flips: tuple[Flip, ...] = ()
    decisions: tuple[Decision, ...] = ()


class Simulator:
    """One run of one trace; make a new one for the next."""

    def __init__(self, setup: Setup, trace: RequestLog) -> None:
        self._setup, self._trace = setup, trace
        self._events = EventQueue()
        calibration = setup.calibration
        self._names = BlockNames(trace.block_tokens, calibration.block_tokens)
        counts = {RoleName.PREFILL: setup.prefill, RoleName.DECODE: setup.decode, RoleName.MIXED: setup.mixed}
        self.workers = {
            name: VirtualWorker(name, role, calibration, self._events, partial(self._published, name), setup.queue)
            for role, count in counts.items()
            for name in (WorkerId(f"{role.value}-{number}") for number in range(count))
        }
        self._net = SimulatedNetwork(self._events, Wires(calibration.link_bytes_per_s), calibration.rpc_s, self)
        self._net.workers = self.workers
        for worker in self.workers.values():
            self._take_role(worker, worker.role_name)
        self._fetches = {n: Fetches(w, self._net, partial(self._run_at, w)) for n, w in self.workers.items()}
        self._fronts = [SimulatedRouter(list(self.workers.values()), setup, self._events) for _ in range(setup.routers)]
        for front in self._fronts:
            front.others = [other for other in self._fronts if other is not front]
        self.steering = RoleChanger(self.workers, self._fronts, self._events, self._take_role, setup.flip_s)
        self._planning: PlannerLoop | None = None
        if setup.planner is not None:
            self._planning = PlannerLoop(
                setup, setup.planner, self.workers, self.steering, self._events, self._is_going
            )  # fmt: skip
        self._finished: list[SimulatedRequest] = []
        self._without_token = 0
        self._waiting = 0

    def run(self) -> Outcome:
        """Play the whole trace and wait for the last answer. RuntimeError if the cluster comes to rest before it."""
        requests = self._trace.requests
        if not requests:
            raise ConfigError("the trace is empty", why="there is nothing to play")
        for number, request in enumerate(requests, 1):
            self._check(number, request)
            self._events.at(request.arrival_s, partial(self._arrive, number, request))
        self._events.at(requests[-1].arrival_s, self._note_waiting)
        self._events.run()
        for worker in self.workers.values():
            worker.scheduler.check_integrity()
        if len(self._finished) != len(requests):
            raise RuntimeError(f"{len(requests) - len(self._finished)} of {len(requests)} requests have not ended")
        return Outcome(
            trace=self._trace,
            records=tuple(record(flight) for flight in sorted(self._finished, key=lambda f: f.number)),
            work=tuple(worker.done for worker in self.workers.values()),
            ended_s=self._events.now_s(),
            waiting=self._waiting,
            events=self._events.events,
            flips=tuple(self.steering.done),
            decisions=tuple(self._planning.decisions) if self._planning is not None else (),
        )

    # ---- the router's ends -----------------------------------------------------------------------------------------

    def first_token(self, flight: SimulatedRequest) -> None:
        self._without_token -= 1
        if self._planning is not None:
            self._planning.started(flight)
        self._front(flight.number).computed(flight)

    def handed_over(self, flight: SimulatedRequest) -> None:
        self._front(flight.number).handed_over(flight)

    def finished(self, flight: SimulatedRequest) -> None:
        self._front(flight.number).finished(flight)
        self._finished.append(flight)
        if self._planning is not None:
            self._planning.ended(flight)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _check(self, number: int, request: TraceRequest) -> None:
        calibration = self._setup.calibration
        needed = -(-(request.prompt_tokens + request.output_tokens) // calibration.block_tokens)
        if needed > calibration.blocks:
            raise ConfigError(
                f"request {number} needs {needed} blocks", why=f"a worker has {calibration.blocks}",
                todo="raise kv_tokens of the calibration or take another trace",
            )  # fmt: skip

    def _arrive(self, number: int, request: TraceRequest) -> None:
        self._without_token += 1
        if self._planning is not None:
            self._planning.came(number, request)
        hashes = self._names.hashes(request, number)
        self._front(number).admit(request, hashes, partial(self._send, number, request, hashes))

    def _send(self, number: int, request: TraceRequest, hashes: list[BlockHash]) -> None:
        plan = self._front(number).plan(request, hashes)
        prefill = plan.prefill or plan.decode
        flight = SimulatedRequest(
            number=number, request=request, hashes=hashes, plan=plan, prefill=prefill, decode=plan.decode,
            announced_s=self._events.now_s() + self._net.rpc_s,
        )  # fmt: skip
        self._front(number).sent(flight)
        self._events.after(self._net.rpc_s, partial(self._submit, flight))

    def _submit(self, flight: SimulatedRequest) -> None:
        worker = self.workers[flight.prefill]
        self.workers[flight.decode].flights[flight.key] = worker.flights[flight.key] = flight
        if flight.decode != flight.prefill:
            self._net.events.after(self._net.rpc_s, partial(self._front(flight.number).queued, flight, flight.decode))
        worker.post(partial(self._acknowledge, flight))
        worker.post(partial(self._fetches[flight.prefill].begin, flight))

    def _acknowledge(self, flight: SimulatedRequest) -> None:
        flight.received_s = self._events.now_s()
        self._events.after(self._net.rpc_s, partial(self._front(flight.number).queued, flight, flight.prefill))

    def _run_at(self, worker: VirtualWorker, flight: SimulatedRequest) -> None:
        worker.add(flight, RequestKind.FULL if flight.plan.prefill is None else RequestKind.PREFILL_ONLY)

    def _published(self, worker: WorkerId, events: Sequence[CacheEvent]) -> None:
        for front in self._fronts:
            front.published(worker, events)

    def _front(self, number: int) -> SimulatedRouter:
        """Return the router of this request."""
        return self._fronts[number % len(self._fronts)]

    def _note_waiting(self) -> None:
        self._waiting = self._without_token

    def _is_going(self) -> bool:
        return len(self._finished) < len(self._trace.requests)

    def _take_role(self, worker: VirtualWorker, role: RoleName) -> None:
        """Change its role from now on; it has no work at this moment."""
        net, name = self._net, worker.worker
        worker.role_name = role
        net.prefilling.pop(name, None)
        net.decoding.pop(name, None)
        if role is RoleName.PREFILL:
            worker.role = net.prefilling[name] = PrefillSide(worker, net)
        elif role is RoleName.DECODE:
            worker.role = net.decoding[name] = DecodeSide(worker, net)
        else:
            worker.role = WholeSide(worker, net)
