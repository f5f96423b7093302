"""The rate of a queue counts only the time with waiting requests, and forgets."""

from __future__ import annotations

import pytest

from tandem.router.admission.throughput import KNOWN_AFTER_SENT, MEMORY_S, DrainRate


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
