"""Test a virtual worker, its wires, its reports and the event core."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from tandem.controlplane.simulator import worker as virtual
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.events import EventQueue
from tandem.controlplane.simulator.handoff import Wires
from tandem.controlplane.simulator.reports import Reports, SimulatedLoad
from tandem.controlplane.simulator.simulated_request import SimulatedRequest
from tandem.controlplane.simulator.traces import TraceRequest
from tandem.controlplane.simulator.worker import VirtualWorker
from tandem.core.block_hash import chain
from tandem.core.clock import ManualClock
from tandem.core.ids import WorkerId
from tandem.core.kv_layout import KVLayout
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import RoleName
from tandem.engine.engine import Engine
from tandem.engine.request import EngineRequest, RequestKind, TokenOutput
from tandem.engine.runner_protocol import SampleRow, StepBatch
from tandem.router.routing.plan import Plan

SIZE = 16
SETTINGS = Calibration(
    prefill_step_s=0.003, prefill_token_s=1e-4, prefill_context_s=1e-8, decode_step_s=0.01, decode_sequence_s=0.001,
    decode_context_s=0.0, kv_token_bytes=64, kv_tokens=SIZE * 64, block_tokens=SIZE,
    max_step_tokens=64, chunk_tokens=48, max_step_s=0.2, max_sequences=6,
)  # fmt: skip


@dataclass
class Case:
    arrival_s: float
    prompt: tuple[int, ...]
    output_tokens: int


def cases(seed: int, count: int) -> list[Case]:
    """Prompts share leading blocks; arrivals come in bursts and pauses."""
    dice = random.Random(seed)
    stems = [tuple(dice.randrange(1000) for _ in range(SIZE * 6)) for _ in range(3)]
    made, at_s = [], 0.0
    for _ in range(count):
        at_s += dice.choice((0.0, 0.004, 0.03, 0.5)) * dice.random()
        own = tuple(dice.randrange(1000) for _ in range(dice.randrange(1, 5 * SIZE)))
        prompt = dice.choice(stems)[: dice.randrange(6 * SIZE)] + own
        made.append(Case(at_s, prompt, dice.choice((1, 2, 9, 40, 90))))
    return made


class TimedRunner:
    """Takes the calibration's time; the token is the request's number, which is its seed."""

    def __init__(self, settings: Calibration, clock: ManualClock) -> None:
        self._settings, self._clock = settings, clock
        self.layout: KVLayout = settings.layout()
        self.max_model_len = 100_000
        self.vocab_size = 1 << 20
        self.eos_token_ids: tuple[int, ...] = ()
        self.num_blocks: tuple[int, ...] = (settings.blocks,)
        self.ahead = None

    def step(
        self, batch: StepBatch, rows: Sequence[SampleRow], on_layers: Callable[[int, int], None] | None = None
    ) -> list[TokenOutput]:
        settings, decodes, chunks_s = self._settings, 0, []
        for sequence in batch.sequences:
            start = sequence.context_tokens - sequence.query_tokens
            if sequence.query_tokens == 1:
                decodes += 1
            else:
                chunks_s.append(settings.chunk_s(start, sequence.context_tokens))
        decode_s = settings.decode_s(decodes, 0) if decodes else 0.0
        self._clock.advance(decode_s + (settings.prefill_step_s + sum(chunks_s) if chunks_s else 0.0))
        return [TokenOutput(row.sampling.params.seed) for row in rows]

    def copy_blocks(self, group: int, pairs: list[tuple[int, int]]) -> None:
        raise AssertionError("requests of one choice copy nothing")


def by_engine(settings: Calibration, given: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """Moments of the first and last token by key."""
    clock = ManualClock()
    engine = Engine(TimedRunner(settings, clock), config=settings.scheduler, clock=clock)
    waiting = list(enumerate(given, 1))
    seen: dict[str, list[float]] = {}
    ended_s = -1.0
    while waiting or engine.has_work:
        if not engine.has_work:
            clock.advance(max(0.0, waiting[0][1].arrival_s - clock.now_s()))
        while waiting and waiting[0][1].arrival_s <= clock.now_s():
            number, case = waiting.pop(0)
            sampling = SamplingParams(max_tokens=case.output_tokens, temperature=0.0, seed=number)
            engine.add(
                EngineRequest(
                    key=str(number), prompt=case.prompt, sampling=sampling, hash_root=virtual.ROOT,
                    arrival_s=case.arrival_s,
                )
            )  # fmt: skip
            if case.arrival_s > ended_s:
                break  # an idle worker begins at once: arrivals in the same moment wait for the end of the step
        outputs = engine.step().outputs
        ended_s = clock.now_s()
        for output in outputs:
            seen.setdefault(output.key, []).append(clock.now_s())
    return {key: (moments[0], moments[-1]) for key, moments in seen.items()}


class Witness:
    """Writes down when tokens come."""

    def __init__(self, worker: VirtualWorker, events: EventQueue) -> None:
        self._worker, self._events = worker, events
        self.seen: dict[str, tuple[float, float]] = {}

    def before_step(self) -> None:
        return

    def decoded(self, flight: SimulatedRequest) -> None:
        flight.first_token_s = self._events.now_s()

    def finished(self, flight: SimulatedRequest) -> None:
        assert flight.first_token_s is not None
        self._worker.flights.pop(flight.key)
        self.seen[flight.key] = (flight.first_token_s, self._events.now_s())

    def _unexpected(self, flight: SimulatedRequest, started_s: float = 0.0) -> None:
        raise AssertionError(f"request {flight.key} is no PREFILL_ONLY one")

    began = computed = first_token = _unexpected


def by_simulator(settings: Calibration, given: Sequence[Case]) -> tuple[dict[str, tuple[float, float]], VirtualWorker]:
    events = EventQueue()
    worker = VirtualWorker(WorkerId("w"), RoleName.MIXED, settings, events, lambda _: None)
    witness = worker.role = Witness(worker, events)
    for number, case in enumerate(given, 1):
        request = TraceRequest(
            arrival_s=case.arrival_s, prompt_tokens=len(case.prompt), output_tokens=case.output_tokens
        )
        plan = Plan(decode=WorkerId("w"), prefill=None, reason="")
        flight = SimulatedRequest(
            number=number, request=request, hashes=chain(virtual.ROOT, case.prompt, SIZE), plan=plan,
            prefill=WorkerId("w"), decode=WorkerId("w"),
        )  # fmt: skip

        def submit(flight: SimulatedRequest = flight) -> None:
            worker.flights[flight.key] = flight
            worker.post(partial(worker.add, flight, RequestKind.FULL))

        events.at(case.arrival_s, submit)
    events.run()
    worker.scheduler.check_integrity()
    return witness.seen, worker


def assert_same(ours: dict[str, tuple[float, float]], theirs: dict[str, tuple[float, float]]) -> None:
    assert ours.keys() == theirs.keys()
    for key, moments in theirs.items():
        assert ours[key] == pytest.approx(moments, abs=1e-9), key


@pytest.mark.parametrize("seed", range(8))
def test_every_token_comes_when_the_engines_would(seed: int) -> None:
    given = cases(seed, 60)
    ours, worker = by_simulator(SETTINGS, given)
    assert_same(ours, by_engine(SETTINGS, given))
    assert worker.done.requests == 60


@pytest.mark.parametrize("seed", range(4))
def test_also_where_blocks_are_so_short_that_requests_are_preempted(seed: int) -> None:
    settings = _with_tokens(SIZE * 22)
    given = cases(seed, 40)
    ours, worker = by_simulator(settings, given)
    assert_same(ours, by_engine(settings, given))
    assert worker.done.prefill_tokens > 0


def _with_tokens(tokens: int) -> Calibration:
    return dataclasses.replace(SETTINGS, kv_tokens=tokens)


def test_stretches_take_few_events_and_lose_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Case(0.0, tuple(range(50)), 500), Case(0.1, tuple(range(100, 180)), 300)]
    ours, worker = by_simulator(_with_tokens(SIZE * 128), given)
    monkeypatch.setattr(virtual, "MAX_STRETCH_S", 0.0)  # a stretch is one step
    single, same = by_simulator(_with_tokens(SIZE * 128), given)
    assert_same(ours, single)
    assert worker.done.steps == same.done.steps > 500
    assert worker.done.busy_s == pytest.approx(same.done.busy_s)


def test_events_run_by_time_and_ties_in_the_order_they_were_made() -> None:
    events, seen = EventQueue(), []
    for name, when_s in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("third", 1.0)):
        events.at(when_s, lambda name=name: seen.append((name, events.now_s())))  # type: ignore[misc]
    events.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("third", 1.0), ("late", 2.0)]


def test_what_an_event_brings_about_runs_too() -> None:
    events, seen = EventQueue(), []

    def again() -> None:
        seen.append(events.now_s())
        if len(seen) < 3:
            events.after(0.5, again)

    events.after(0.5, again)
    events.run()
    assert seen == [0.5, 1.0, 1.5]


def test_it_stops_where_it_is_told_to() -> None:
    events, seen = EventQueue(), []
    for when_s in (1.0, 2.0, 3.0):
        events.at(when_s, lambda: seen.append(events.now_s()))
    events.run(until_s=2.0)
    assert seen == [1.0, 2.0]
    events.run()
    assert seen == [1.0, 2.0, 3.0]


def test_nothing_happens_in_the_past() -> None:
    events = EventQueue(5.0)
    with pytest.raises(ValueError, match="an event at 4"):
        events.at(4.0, lambda: None)


P0, P1, D0, D1 = (WorkerId(name) for name in ("p0", "p1", "d0", "d1"))


def test_what_one_worker_sends_goes_one_after_the_other() -> None:
    wires = Wires(100.0)
    assert wires.send(P0, D0, 200, from_s=1.0, last_s=1.0) == pytest.approx(3.0)
    assert wires.send(P0, D1, 100, from_s=1.0, last_s=1.0) == pytest.approx(4.0)
    assert wires.send(P1, D1, 100, from_s=1.0, last_s=1.0) == pytest.approx(3.0)  # behind the other, coming in
    assert wires.send(P1, D0, 100, from_s=9.0, last_s=9.0) == pytest.approx(10.0)
    assert wires.sent_bytes == {(P0, D0): 200, (P0, D1): 100, (P1, D1): 100, (P1, D0): 100}


def test_a_fast_link_waits_for_the_last_part_alone() -> None:
    assert Wires(1000.0).send(P0, D0, 400, from_s=0.0, last_s=8.0, parts=4) == pytest.approx(8.1)
    assert Wires(10.0).send(P0, D0, 400, from_s=0.0, last_s=8.0, parts=4) == pytest.approx(40.0)


def _at(reports: Reports, moment_s: float) -> int:
    return reports.seen(moment_s)[1].queued_tokens


def _turn(reports: Reports, now_s: float, tokens: int, *, is_stepping: bool) -> None:
    reports.turn(now_s, lambda: SimulatedLoad(queued_tokens=tokens), is_stepping=is_stepping)


def test_a_busy_worker_reports_at_the_end_of_a_step() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=True)
    _turn(reports, 1.05, 20, is_stepping=True)  # too soon, and then it computes
    _turn(reports, 1.3, 30, is_stepping=True)
    assert [_at(reports, s) for s in (0.99, 1.0, 1.2, 1.29, 1.3, 9.0)] == [0, 10, 10, 10, 30, 30]


def test_an_idle_worker_says_a_little_later_what_was_too_soon() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=False)
    _turn(reports, 1.04, 20, is_stepping=False)
    assert [_at(reports, s) for s in (1.05, 1.09, 1.11)] == [10, 10, 20]


def test_what_was_not_yet_sent_is_replaced() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=False)
    _turn(reports, 1.04, 20, is_stepping=False)
    _turn(reports, 1.06, 30, is_stepping=True)
    _turn(reports, 1.5, 40, is_stepping=True)
    assert [_at(reports, s) for s in (1.2, 1.49, 1.5)] == [10, 10, 40]


def test_in_a_stretch_of_equal_steps_reports_go_on() -> None:
    reports = Reports(SimulatedLoad())
    reports.turn(1.0, lambda: SimulatedLoad(queued_tokens=7), is_stepping=True, is_stretching=True)
    sent_s, load = reports.seen(1.56)
    assert (round(sent_s, 9), load.queued_tokens) == (1.5, 7)
