"""The effect of a choice on promises, as probabilities and the promised time."""

from __future__ import annotations

import math

import pytest

from tandem.router.routing.slo_penalty import UNSURE, SloPromise

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
