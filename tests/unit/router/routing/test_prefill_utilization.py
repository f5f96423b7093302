"""The share of its time in which a worker computes prompts, from a counter in its reports."""

from __future__ import annotations

import math

import pytest

from tandem.router.routing.prefill_utilization import FADE_S, ComputingShare


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
