"""Test the load of workers as routing sees it."""

import math
from typing import Any

import pytest

from tandem.core.prefill_queue import ASSUMED_TOKENS_PER_S, QueuedWork, QueueRules, attended
from tandem.router.routing.cost_model import ANSWER_TOKENS, UNSURE, SloPromise
from tandem.router.routing.observed_traffic import (
    FADE_S,
    STALE_S,
    AnswerLengths,
    ComputingShare,
    InFlightWork,
    Outstanding,
    sent,
)
from tandem.router.routing.plan import Job
from tests.unit.router.candidates import at


def prompt(tokens: int) -> InFlightWork:
    return InFlightWork(work=QueuedWork(1.0, tokens), blocks=1)


def test_counted_at_once_and_no_more_when_a_report_counts_it() -> None:
    outstanding = Outstanding()
    outstanding.report(10.0)
    outstanding.add("a", prompt(100))
    assert [work.tokens for work in outstanding.queue(10.0)] == [100]
    outstanding.report(10.1)
    assert outstanding.queue(10.1), "the worker had not got it when it wrote this report"
    outstanding.acknowledge("a")
    assert outstanding.queue(10.15), "no report since"
    outstanding.report(10.2)
    assert (outstanding.queue(10.2), outstanding.uncounted(10.2)) == ([], [])
    outstanding.add("b", prompt(7))
    assert [work.tokens for work in outstanding.queue(10.25)] == [7]


def test_a_stale_report_counts_no_more_and_own_dispatches_do() -> None:
    outstanding = Outstanding()
    assert outstanding.is_stale(0.0), "there was none"
    outstanding.add("a", prompt(100))
    outstanding.acknowledge("a")
    outstanding.report(10.0)
    assert not outstanding.is_stale(10.0 + STALE_S)
    late_s = 10.1 + STALE_S
    assert outstanding.is_stale(late_s)
    assert [work.tokens for work in outstanding.queue(late_s)] == [100]
    assert outstanding.compute("a")
    assert not outstanding.compute("a"), "only once"
    assert (outstanding.queue(late_s), len(outstanding.uncounted(late_s))) == ([], 1)


def test_ends_leave_nothing() -> None:
    outstanding = Outstanding()
    for name in ("a", "b"):
        outstanding.add(name, InFlightWork(work=None))
    outstanding.end("a")
    outstanding.end("a")
    for of_nobody in (outstanding.acknowledge, outstanding.compute):
        of_nobody("a")
    assert (len(outstanding), outstanding.queue(0.0)) == (1, [])
    outstanding.report(5.0)
    outstanding.clear()
    assert (len(outstanding), outstanding.is_stale(5.0)) == (0, True)


def test_what_a_leg_counts_as() -> None:
    job = Job(prompt_tokens=1000, max_tokens=9, choices=2, now_s=50.0, deadline_s=650.0)
    there: dict[str, Any] = {"held_tokens": 200, "block_tokens": 16, "rules": QueueRules(stretch=10.0)}
    decoding = sent(job, known_tokens=None, speed=at(0.0), **there)
    assert (decoding.work, decoding.blocks) == (None, 50 + 2)
    assert sent(job, known_tokens=500, speed=at(1000.0), **there).work == QueuedWork(
        55.0, 500, attended=attended(500, 1000)
    )
    assert sent(job, known_tokens=1000, speed=at(1.0), **there).work == QueuedWork(60.0, 1, attended=999.5), (
        "the last token is computed"
    )
    unknown = sent(job, known_tokens=0, speed=at(0.0), **there).work
    assert unknown == QueuedWork(50.0 + 10 * 1000 / ASSUMED_TOKENS_PER_S, 1000, attended=500_000.0)
    slowly = sent(job, known_tokens=500, speed=at(1000.0, 1e-6), **there).work
    assert slowly is not None
    assert slowly.due_s == 50.0 + 10 * (0.5 + 375_000 * 1e-6)


def test_kv_is_on_its_way_from_the_first_token_to_the_next_one() -> None:
    """At the worker that computed it until that one is let go, at the other until its own first token."""
    sender, receiver = Outstanding(), Outstanding()
    sender.add("a", InFlightWork(work=QueuedWork(1.0, 100), moved_tokens=100))
    receiver.add("a", InFlightWork(work=None, moved_tokens=100))
    sender.add("b", InFlightWork(work=QueuedWork(1.0, 7)))
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (0, 0), "not computed yet"
    before = receiver.changes
    for name in ("a", "b"):
        assert sender.compute(name)
        receiver.depart(name)
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (100, 100)
    assert receiver.changes > before, "a plan that was made of it is out of date"
    sender.end("a")
    assert not receiver.compute("a")
    receiver.depart("a")
    assert (sender.tokens_in_transfer, receiver.tokens_in_transfer) == (0, 0)
    receiver.add("c", InFlightWork(work=None, moved_tokens=5))
    receiver.depart("c")
    receiver.clear()
    assert receiver.tokens_in_transfer == 0


def test_the_first_answers_do_not_decide_alone_and_later_ones_count_most() -> None:
    lengths = AnswerLengths()
    assert lengths.mean("m") == ANSWER_TOKENS
    lengths.ended("m", 1)
    assert 100 < lengths.mean("m") < ANSWER_TOKENS
    for _ in range(1000):
        lengths.ended("m", 500)
    assert lengths.mean("m") == pytest.approx(500, rel=0.1)
    for _ in range(300):
        lengths.ended("m", 20)
    assert lengths.mean("m") < 100
    assert lengths.mean("another") == ANSWER_TOKENS


def test_it_follows_the_counter_and_forgets() -> None:
    one = ComputingShare()
    one.report(10.0, 500.0)
    assert one.share == 0.0, "what was before the first report says nothing of late"
    seconds = 500.0
    for number in range(1, 401):
        seconds += 0.06
        one.report(10.0 + 0.1 * number, seconds)
    assert one.share == pytest.approx(0.6, rel=1e-3)
    one.report(50.0 + FADE_S, seconds)
    assert one.share == pytest.approx(0.6 * math.exp(-1), rel=1e-3)


def test_a_step_longer_than_between_reports_is_no_more_than_all_of_the_time() -> None:
    one = ComputingShare()
    one.report(0.0, 0.0)
    one.report(0.1, 5.0)
    assert 0.0 < one.share < 0.1


def test_a_counter_that_begins_anew_and_a_report_of_the_same_moment_change_nothing() -> None:
    one = ComputingShare()
    one.report(0.0, 7.0)
    one.report(5.0, 12.0)
    known = one.share
    one.report(5.0, 12.0)
    one.report(6.0, 0.0)
    assert one.share == known
    one.clear()
    assert one.share == 0.0
    one.report(7.0, 3.0)
    one.report(8.0, 3.0)
    assert one.share == 0.0


MADE = SloPromise(ttft_s=2.0, itl_s=0.05, answer_tokens=40.0, given_s=2.0)
NOTHING = SloPromise(ttft_s=math.inf, itl_s=math.inf, answer_tokens=40.0, given_s=math.inf)


def test_a_promise_is_worth_the_time_that_it_gives() -> None:
    assert MADE.worth_s == 2.0 + 40 * 0.05
    assert NOTHING.worth_s == 0.0
    assert SloPromise(math.inf, 0.05, 40.0, math.inf).worth_s == 2.0
    assert SloPromise(2.0, math.inf, 40.0, 2.0).worth_s == 2.0


def test_nothing_is_broken_where_nothing_was_promised() -> None:
    assert (NOTHING.late(1e9), NOTHING.slowed(1e9), NOTHING.paused(1e9, 1.0)) == (0.0, 0.0, 0.0)


def test_a_prediction_near_the_promise_may_go_either_way() -> None:
    for broken, limit_s in ((MADE.late, 2.0), (MADE.slowed, 0.05)):
        assert broken(limit_s) == pytest.approx(0.5)
        assert broken(limit_s * (1 - UNSURE)) == pytest.approx(0.0, abs=1e-9)
        assert broken(limit_s * (1 + UNSURE)) == pytest.approx(1.0)
        assert 0.0 < broken(limit_s * 0.9) < 0.5 < broken(limit_s * 1.1) < 1.0
    assert SloPromise(-1.0, 0.05, 40.0, 2.0).late(0.0) == 1.0, "it is late already"


def test_short_answers_do_not_make_up_for_a_pause() -> None:
    assert MADE.paused(0.0, 0.01) == 0.0
    assert MADE.paused(0.4, 0.01) == pytest.approx(1 - math.exp(-0.4 / 1.6))
    assert MADE.paused(0.4, 0.01, 2.0) == pytest.approx(1 - math.exp(-0.4 / 3.2)), "longer ones rather do"
    assert MADE.paused(0.4, 0.01) < MADE.paused(0.4, 0.03) < MADE.paused(0.4, 0.06) < 1.0
