"""Test the room of workers, the rate of a queue, and whole requests."""

import math
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.config import AdmissionSection, Disaggregation
from tandem.core.ids import RequestId, WorkerId
from tandem.core.prefill_queue import QueuedWork, QueueRules
from tandem.core.sampling import SamplingParams
from tandem.core.state_enums import RoleName
from tandem.router.admission.admission_controller import AdmissionController, CapacityCheck, QueuedRequest
from tandem.router.admission.fair_queue import KNOWN_AFTER_SENT, MEMORY_S, DrainRate
from tandem.router.dispatch.inflight_request import ArrivalQueue, GenerationRequest
from tandem.router.metrics.router import Metrics
from tandem.router.routing.observed_traffic import InFlightWork, Outstanding
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad
from tests.unit.router.candidates import at
from tests.unit.router.stage import Stage

NOW_S = 50.0
RULES = AdmissionSection(worker_queue_s=0.25, worker_queue_requests=4)
DECODE, PREFILL, MIXED = RoleName.DECODE, RoleName.PREFILL, RoleName.MIXED


def demand(prompt_tokens: int = 160, compute_s: float | None = None) -> QueuedRequest:
    return QueuedRequest(
        prompt_tokens=prompt_tokens, choices=1, cost=1, compute_s=compute_s, compute_time=lambda: 0.0,
        grant=lambda: None, refuse=lambda error: None,
    )  # fmt: skip


def link(role: RoleName, sent: int = 0, tokens: int = 1000, reported_s: float | None = NOW_S, **load: Any) -> Any:
    """A worker that was sent `sent` prompts of `tokens` since it reported `load`."""
    outstanding = Outstanding()
    for number in range(sent):
        work = QueuedWork(0.0, tokens) if role is not DECODE else None
        outstanding.add(str(number), InFlightWork(work=work, blocks=11))
    if reported_s is not None:
        outstanding.report(reported_s)
    facts = SimpleNamespace(role=role, block_tokens=16)
    return SimpleNamespace(worker="w", facts=facts, load=ReportedLoad(**load), outstanding=outstanding)


def has_room(*links: Any, least_itl_s: float = math.inf, now_s: float = NOW_S) -> bool:
    return CapacityCheck(RULES, lambda: least_itl_s).is_there(demand(), links, now_s)


def blocks(free: int, total: int = 100) -> tuple[BlockCounts, ...]:
    return (BlockCounts(group=0, total=total, free=free, cached=0, request=total - free, reserved=0, pushing=0),)


def test_nobody_waits_for_workers_that_are_not_there() -> None:
    assert has_room()


def test_a_few_prompts_may_queue_at_a_worker_so_that_short_ones_overtake_there() -> None:
    assert has_room(link(PREFILL, sent=3, prefill_speed=at(10.0)), link(DECODE))
    assert not has_room(link(PREFILL, sent=4, prefill_speed=at(10.0)), link(DECODE))


def test_as_many_as_are_computed_in_no_time_may_queue() -> None:
    assert has_room(link(PREFILL, sent=24, tokens=1, prefill_speed=at(100.0)), link(DECODE))
    assert not has_room(link(PREFILL, sent=25, tokens=1, prefill_speed=at(100.0)), link(DECODE))


def test_one_worker_with_room_is_enough() -> None:
    assert has_room(link(PREFILL, sent=9, prefill_speed=at(10.0)), link(PREFILL), link(DECODE))


def test_what_was_reported_has_been_worked_on_since() -> None:
    rows = tuple(QueuedWork(NOW_S, 30) for _ in range(10))
    busy: dict[str, Any] = {"queue": rows, "prefill_speed": at(1000.0)}
    assert not has_room(link(PREFILL, **busy), link(DECODE))
    assert has_room(link(PREFILL, **busy), link(DECODE), now_s=NOW_S + 0.06)


def test_what_was_sent_since_the_report_has_not_been_worked_on() -> None:
    """The worker may have got it just now, however long ago the report was."""
    fast: dict[str, Any] = {"prefill_speed": at(1000.0)}
    assert not has_room(link(PREFILL, sent=5, tokens=60, **fast), link(DECODE), now_s=NOW_S + 0.5)
    both = {**fast, "queue": (QueuedWork(NOW_S, 100),)}
    assert not has_room(link(PREFILL, sent=5, tokens=50, **both), link(DECODE), now_s=NOW_S + 0.5)
    assert has_room(link(PREFILL, sent=5, tokens=49, **both), link(DECODE), now_s=NOW_S + 0.1)


def test_what_a_short_prompt_would_overtake_is_not_ahead_of_it() -> None:
    rules, long = QueueRules(), QueuedWork(NOW_S + 20.0, 30_000)
    busy = link(PREFILL, queue=(long,) * 4, queued_requests=4, queued_tokens=120_000, queue_rules=rules)
    assert not has_room(busy, link(DECODE))
    short, other = (demand(16, each) for each in (0.01, 2.0))
    assert CapacityCheck(RULES).is_there(short, [busy, link(DECODE)], NOW_S)
    assert not CapacityCheck(RULES).is_there(other, [busy, link(DECODE)], NOW_S)


def test_prompts_of_about_one_length_do_not_overtake_each_other() -> None:
    rules = QueueRules()
    sent = tuple(QueuedWork(NOW_S + rules.stretch * 0.05 - 0.01 * number, 500) for number in range(4))
    busy = link(PREFILL, queue=sent, prefill_speed=at(2000.0), queue_rules=rules)
    for compute_s in (0.03, 0.05, 0.07):
        need = demand(100, compute_s)
        assert not CapacityCheck(RULES).is_there(need, [busy, link(DECODE)], NOW_S)


def test_an_old_report_counts_no_more() -> None:
    busy = link(PREFILL, reported_s=NOW_S - 5, queue=(QueuedWork(0.0, 10**6),) * 9)
    assert has_room(busy, link(DECODE))


def test_an_answer_needs_a_decode_worker_where_nobody_waits() -> None:
    assert not has_room(link(PREFILL), link(DECODE, queued_requests=1))
    assert has_room(link(PREFILL), link(DECODE, queued_requests=1), link(DECODE))
    assert not has_room(link(PREFILL, sent=4, prefill_speed=at(10.0)), link(DECODE))


def test_an_answer_needs_blocks() -> None:
    assert has_room(link(PREFILL), link(DECODE, in_flight=1, blocks=blocks(free=11)))
    assert not has_room(link(PREFILL), link(DECODE, in_flight=1, blocks=blocks(free=10)))
    assert not has_room(link(PREFILL), link(DECODE, sent=1, in_flight=1, blocks=blocks(free=21)))


def test_a_request_that_never_fits_is_not_held_back() -> None:
    assert has_room(link(PREFILL), link(DECODE, blocks=blocks(free=5, total=5)))


def test_steps_stay_as_short_as_was_promised() -> None:
    steps: dict[str, Any] = {"decode_step_s": 0.04, "decode_sequence_s": 0.005, "decoding_sequences": 8}
    assert has_room(link(PREFILL), link(DECODE, **steps), least_itl_s=0.045)
    assert not has_room(link(PREFILL), link(DECODE, **steps), least_itl_s=0.044)
    assert not has_room(link(PREFILL), link(DECODE, sent=1, **steps), least_itl_s=0.045)
    idle: dict[str, Any] = {**steps, "decoding_sequences": 0}
    assert has_room(link(PREFILL), link(DECODE, **idle), least_itl_s=0.01)


def test_a_mixed_worker_has_to_have_both() -> None:
    assert has_room(link(MIXED, sent=3, prefill_speed=at(10.0)))
    assert not has_room(link(MIXED, sent=4, prefill_speed=at(10.0)))
    assert not has_room(link(MIXED, in_flight=1, blocks=blocks(free=3)))


def test_a_whole_request_needs_room_for_its_answer_and_at_a_prefill_worker_for_its_prompt() -> None:
    def has_whole(one: Any) -> bool:
        return CapacityCheck(RULES).is_there_whole(demand(), one, NOW_S)

    full: dict[str, Any] = {"in_flight": 1, "blocks": blocks(free=10)}
    for role in (PREFILL, DECODE):
        assert has_whole(link(role))
        assert not has_whole(link(role, **full))
    assert not has_whole(link(PREFILL, sent=4, prefill_speed=at(10.0))), "others are ahead of it"
    assert has_whole(link(DECODE, prefill_speed=at(10.0)))
    assert not has_whole(link(DECODE, queued_requests=1)), "somebody waits for blocks there"
    gone = link(PREFILL)
    gone.facts = None
    assert not has_whole(gone)


def worked(rate: DrainRate, begin_s: float, seconds: int, cost: float) -> float:
    rate.watch(begin_s, is_busy=True)
    for tenth in range(1, 10 * seconds + 1):
        rate.watch(begin_s + tenth / 10, is_busy=True)
        rate.sent(cost / 10)
    return begin_s + seconds


@pytest.mark.parametrize(("cost", "seconds"), [(1000.0, 0.2), (1.0, 1.0)])
def test_little_waiting_or_one_departure_says_nothing(cost: float, seconds: float) -> None:
    """On a machine that starts while others work, one small request would refuse the next thousand tokens for hours."""
    rate = DrainRate()
    rate.watch(0.0, is_busy=True)
    rate.sent(cost)
    rate.watch(seconds, is_busy=True)
    assert rate.per_s is None


def test_eight_departures_are_believed() -> None:
    rate = DrainRate()
    rate.watch(0.0, is_busy=True)
    rate.watch(1.0, is_busy=True)
    for _ in range(KNOWN_AFTER_SENT - 1):
        rate.sent(500.0)
    assert rate.per_s is None
    rate.sent(500.0)
    assert rate.per_s == pytest.approx(500.0 * KNOWN_AFTER_SENT, rel=0.2)


def test_a_queue_that_hardly_moves_is_known_to_be_slow() -> None:
    rate = DrainRate()
    rate.watch(0.0, is_busy=True)
    rate.sent(100.0)
    rate.watch(MEMORY_S, is_busy=True)
    assert rate.per_s is not None
    assert rate.per_s < 100.0


def test_idle_time_does_not_count() -> None:
    rate = DrainRate()
    end_s = worked(rate, 10.0, seconds=5, cost=100.0)
    rate.watch(end_s, is_busy=False)
    rate.watch(end_s + MEMORY_S, is_busy=True)
    assert rate.per_s == pytest.approx(100.0, rel=0.02)


def test_a_long_time_in_which_nobody_waited_ends_what_is_known() -> None:
    rate = DrainRate()
    end_s = worked(rate, 10.0, seconds=5, cost=100.0)
    rate.watch(end_s, is_busy=False)
    rate.watch(end_s + 2.0, is_busy=False)
    rate.watch(end_s + MEMORY_S + 0.1, is_busy=True)
    assert rate.per_s is None


def test_what_is_old_counts_less() -> None:
    rate = DrainRate()
    end_s = worked(rate, 0.0, seconds=30, cost=100.0)
    worked(rate, end_s, seconds=15, cost=400.0)
    assert rate.per_s == pytest.approx(400.0, rel=0.06)


def test_how_long_nobody_has_waited() -> None:
    rate = DrainRate()
    assert rate.idle_s(0.0) == float("inf")
    rate.watch(10.0, is_busy=True)
    assert rate.idle_s(11.0) == 0.0
    rate.watch(12.0, is_busy=False)
    assert rate.idle_s(15.0) == pytest.approx(3.0)


PROMPT_TOKENS = 1000
LIMIT = AdmissionSection().worker_queue_requests
AUTO, NEVER = Disaggregation.AUTO, Disaggregation.NEVER


class Crowd:
    """Requests that all come at once to workers that never reported."""

    def __init__(self, stack: ExitStack, mode: Disaggregation, *workers: str) -> None:
        self.stage, self._stack = Stage(*workers, disaggregation=mode), stack
        room, rules = CapacityCheck(AdmissionSection()), AdmissionSection()
        table, clock = self.stage.table, self.stage.clock

        def has_place(worker: WorkerId, need: QueuedRequest) -> bool:
            return room.is_there_whole(need, self.stage.link(worker), clock.now_s())

        self.admission = AdmissionController(
            rules,
            clock,
            lambda model, need: room.is_there(need, table.usable(model), clock.now_s()),
            Metrics(list, lambda: 0),
            has_place=has_place,
        )
        self.stage.dispatcher._queue = self.admission
        self.work = GenerationRequest(
            prompt=[1] * PROMPT_TOKENS, sampling=SamplingParams(max_tokens=200), timeout_s=60.0
        )

    def come(self, count: int) -> None:
        for number in range(count):
            self._enter(RequestId(str(number)))
        self.admission.pump()

    def _enter(self, request: RequestId) -> None:
        now_s, dispatcher, inbox = self.stage.clock.now_s(), self.stage.dispatcher, ArrivalQueue(1 << 20)

        def send() -> None:
            self._stack.enter_context(dispatcher.submit(request, 0, self.work, inbox))

        self.admission.enter(
            QueuedRequest(
                prompt_tokens=PROMPT_TOKENS, choices=1, cost=PROMPT_TOKENS, arrived_s=now_s, deadline_s=now_s + 60.0,
                grant=send, refuse=inbox.fail, compute_time=lambda: 0.2,
                alone=lambda waiting: dispatcher.alone(self.work, waiting),
            )
        )  # fmt: skip

    def sent_to(self, worker: str) -> int:
        return len(self.stage.link(worker).outstanding)


@pytest.mark.parametrize(
    ("mode", "workers"), [(AUTO, ["d1"]), (NEVER, ["d1"]), (AUTO, ["d1", "d2"]), (NEVER, ["m1"])], ids=str
)
async def test_where_one_kind_of_worker_serves_its_queue_is_as_short_as_was_set(
    mode: Disaggregation, workers: list[str]
) -> None:
    with ExitStack() as stack:
        crowd = Crowd(stack, mode, *workers)
        crowd.come(300)
        assert [crowd.sent_to(worker) for worker in workers] == [LIMIT] * len(workers)
        assert crowd.admission.waiting == 300 - LIMIT * len(workers)


@pytest.mark.parametrize("other", ["p1", "m1"])
async def test_a_decode_worker_takes_whole_requests_while_that_is_better_than_the_others(other: str) -> None:
    with ExitStack() as stack:
        crowd = Crowd(stack, AUTO, other, "d1")
        crowd.come(300)
        assert crowd.sent_to(other) == LIMIT
        assert LIMIT < crowd.sent_to("d1") < 300 - LIMIT, "as many as cost less there, and no more"
        assert crowd.admission.waiting == 300 - len(crowd.stage.dispatcher.flights)


async def test_a_decode_worker_is_nobodys_better_choice_with_never() -> None:
    with ExitStack() as stack:
        for mode, worker in ((AUTO, "d1"), (NEVER, None)):
            crowd = Crowd(stack, mode, "p1", "d1")
            crowd.come(9)
            assert crowd.stage.dispatcher.alone(crowd.work, 99) == worker
