"""The retry budget: bounded in bursts and over time, under any load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.router.dispatch.retry_budget import RetryBudget


def test_a_burst_then_a_share_of_the_requests() -> None:
    budget = RetryBudget(3, 0.5, 0.0, ManualClock())
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    budget.deposit()
    assert not budget.take()
    budget.deposit()
    assert budget.take()
    assert not budget.take()


def test_time_fills_it_up_to_the_burst() -> None:
    clock = ManualClock()
    budget = RetryBudget(5, 0.0, 2.0, clock)
    while budget.take():
        pass
    clock.advance(1.0)
    assert budget.tokens == pytest.approx(2.0)
    clock.advance(1000.0)
    assert budget.tokens == 5


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["earn", "take"]), st.floats(0, 2)), max_size=80))
def test_never_more_than_was_paid_for(steps: list[tuple[str, float]]) -> None:
    clock = ManualClock()
    budget = RetryBudget(4, 0.2, 0.5, clock)
    taken = earned = 0
    for what, pause_s in steps:
        clock.advance(pause_s)
        if what == "earn":
            budget.deposit()
            earned += 1
        else:
            taken += budget.take()
        assert 0 <= budget.tokens <= 4
        assert taken <= 4 + 0.2 * earned + 0.5 * clock.now_s() + 1e-6
