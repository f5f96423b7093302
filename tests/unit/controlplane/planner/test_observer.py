"""The planner's inputs: recent requests and measured rates."""

from __future__ import annotations

import pytest

from tandem.controlplane.planner.observer import MeasuredRates, RecentRequests, WorkerReport
from tandem.controlplane.planner.records import Rates
from tandem.core.lifecycle import RoleName
from tandem.core.prefill_queue import UNMEASURED, PrefillSpeed


def test_answers_that_go_on_are_taken_to_go_on_as_long_as_they_do_for_each_that_ended() -> None:
    """Eight ended with 10 tokens, two go on with 40: 160 tokens for eight ends, so each has 20 to come."""
    recent = RecentRequests(60.0)
    for number in range(10):
        recent.came(str(number), float(number), 100 + number, "chat")
    recent.started("0", 40)
    for number in range(8):
        recent.ended(str(number), 10)
    recent.ended("gone", 20)
    recent.progressed("0", 99)
    recent.progressed("8", 40)
    recent.progressed("9", 40)
    found = recent.seen()
    assert [one.output_tokens for one in found] == [10] * 8 + [60] * 2
    assert (found[0].prompt_tokens, found[0].cached_tokens, found[0].slo) == (100, 40, "chat")


def test_until_some_have_ended_nothing_is_known_of_lengths() -> None:
    recent = RecentRequests(60.0)
    for number in range(10):
        recent.came(str(number), float(number), 100)
    recent.ended("3", 500)
    assert [one.output_tokens for one in recent.seen()] == [1, 1, 1, 500, 1, 1, 1, 1, 1, 1]


def test_only_the_last_minute_is_kept() -> None:
    recent = RecentRequests(60.0)
    for number in range(100):
        recent.came(str(number), 2.0 * number, 10)
    assert [one.arrival_s for one in recent.seen()] == [2.0 * number for number in range(69, 100)]
    recent.started("0", 5)
    recent.ended("0", 5)
    assert len(recent.seen()) == 31


def report(
    role: RoleName, sequences: int = 0, step_s: float = 0.0, speed: float = 0.0, more: float = 0.0
) -> WorkerReport:
    measured = PrefillSpeed(tokens_per_s=speed) if speed else UNMEASURED
    return WorkerReport(
        role=role, prefill_speed=measured, decoding_sequences=sequences, decode_step_s=step_s, decode_sequence_s=more
    )


def test_steps_of_different_workers_tell_what_a_sequence_adds() -> None:
    rates = MeasuredRates(Rates())
    rates.note([report(RoleName.DECODE, count, 0.01 + 0.002 * count) for count in (1, 5, 9, 20)])
    assert rates.rates.decode_step_s == pytest.approx(0.01)
    assert rates.rates.decode_sequence_s == pytest.approx(0.002)


def test_alike_steps_leave_it_to_what_workers_say() -> None:
    rates = MeasuredRates(Rates())
    rates.note([report(RoleName.DECODE, 10, 0.03, more=0.001)] * 3)
    assert rates.rates.decode_step_s == pytest.approx(0.02)
    assert rates.rates.decode_sequence_s == pytest.approx(0.001)


def test_prompts_are_as_fast_as_at_workers_that_compute_them() -> None:
    rates = MeasuredRates(Rates(handoff_s=0.5))
    computing = [report(RoleName.PREFILL, speed=speed) for speed in (900.0, 1000.0, 0.0)]
    rates.note([*computing, report(RoleName.MIXED, speed=1100.0), report(RoleName.DECODE, speed=1.0)])
    assert rates.rates.prefill.tokens_per_s == 1000.0
    assert rates.rates.handoff_s == 0.5


def test_without_reports_all_stays_as_known() -> None:
    rates = MeasuredRates(Rates(decode_step_s=0.5))
    rates.note([report(RoleName.DECODE), report(RoleName.PREFILL)])
    assert rates.rates == Rates(decode_step_s=0.5)
