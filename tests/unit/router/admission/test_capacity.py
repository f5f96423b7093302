"""When workers have room for one more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from tandem.core.config import AdmissionSection
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import QueuedWork, QueueRules
from tandem.router.admission.capacity import CapacityCheck, ResourceDemand
from tandem.router.routing.inflight_load import InFlightWork, Outstanding
from tandem.router.workers.proto_convert import BlockCounts, ReportedLoad
from tests.unit.router.candidates import at

NOW_S = 50.0
NEED = ResourceDemand(prompt_tokens=160, choices=1)
RULES = AdmissionSection(worker_queue_s=0.25, worker_queue_requests=4)
DECODE, PREFILL, MIXED = RoleName.DECODE, RoleName.PREFILL, RoleName.MIXED


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
    return CapacityCheck(RULES, lambda: least_itl_s).is_there(NEED, links, now_s)


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
    short, other = (ResourceDemand(prompt_tokens=16, choices=1, compute_s=each) for each in (0.01, 2.0))
    assert CapacityCheck(RULES).is_there(short, [busy, link(DECODE)], NOW_S)
    assert not CapacityCheck(RULES).is_there(other, [busy, link(DECODE)], NOW_S)


def test_prompts_of_about_one_length_do_not_overtake_each_other() -> None:
    rules = QueueRules()
    sent = tuple(QueuedWork(NOW_S + rules.stretch * 0.05 - 0.01 * number, 500) for number in range(4))
    busy = link(PREFILL, queue=sent, prefill_speed=at(2000.0), queue_rules=rules)
    for compute_s in (0.03, 0.05, 0.07):
        need = ResourceDemand(prompt_tokens=100, choices=1, compute_s=compute_s)
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
        return CapacityCheck(RULES).is_there_whole(NEED, one, NOW_S)

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
