"""Breakers open after failures in a row, let one trial through, and belong to an incarnation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.router.dispatch.retry_policy import BURST_S, LONGEST_OPEN_S, Breakers, BreakerState, Member

ONE: Member = (WorkerId("w"), Incarnation(1))
AGAIN: Member = (WorkerId("w"), Incarnation(2))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def fail(breakers: Breakers, clock: ManualClock, times: int) -> None:
    for _ in range(times):
        clock.advance(BURST_S)
        breakers.failed(ONE)


def test_opens_after_failures_in_a_row_for_a_while(clock: ManualClock) -> None:
    breakers = Breakers(3, 5.0, clock)
    fail(breakers, clock, 2)
    breakers.succeeded(ONE)
    fail(breakers, clock, 2)
    assert breakers.allows(ONE)
    fail(breakers, clock, 1)
    assert breakers.state(ONE) is BreakerState.OPEN
    assert not breakers.allows(ONE)
    assert breakers.allows(AGAIN), "a worker that was started again"
    clock.advance(5.0)
    assert breakers.state(ONE) is BreakerState.HALF_OPEN


def test_half_open_lets_one_request_through_at_a_time(clock: ManualClock) -> None:
    breakers = Breakers(1, 5.0, clock)
    fail(breakers, clock, 1)
    clock.advance(5.0)
    breakers.sent(ONE, "a")
    assert not breakers.allows(ONE)
    breakers.ended(ONE, "b")
    assert not breakers.allows(ONE)
    breakers.ended(ONE, "a")
    assert breakers.allows(ONE)
    breakers.sent(ONE, "c")
    breakers.succeeded(ONE)
    assert breakers.state(ONE) is BreakerState.CLOSED


def test_a_failed_trial_doubles_the_time_up_to_a_bound(clock: ManualClock) -> None:
    breakers = Breakers(1, 5.0, clock)
    waits = []
    for _ in range(6):
        fail(breakers, clock, 1)
        began_s = clock.now_s()
        while breakers.state(ONE) is BreakerState.OPEN:
            clock.advance(1.0)
        waits.append(clock.now_s() - began_s)
        breakers.sent(ONE, "trial")
    assert waits == [5, 10, 20, 40, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_one_breakage_counts_once(clock: ManualClock) -> None:
    breakers = Breakers(2, 5.0, clock)
    for _ in range(50):
        breakers.failed(ONE)
    assert breakers.allows(ONE)
    clock.advance(BURST_S)
    breakers.failed(ONE)
    assert not breakers.allows(ONE)


def test_what_was_sent_before_says_nothing_about_an_open_one(clock: ManualClock) -> None:
    breakers = Breakers(1, 5.0, clock)
    fail(breakers, clock, 1)
    breakers.succeeded(ONE)
    fail(breakers, clock, 3)
    assert breakers.state(ONE) is BreakerState.OPEN
    clock.advance(5.0 - 3 * BURST_S)
    assert breakers.state(ONE) is BreakerState.HALF_OPEN, "late failures do not prolong it"


def test_zero_never_opens_and_others_are_forgotten(clock: ManualClock) -> None:
    never = Breakers(0, 5.0, clock)
    fail(never, clock, 10)
    assert never.allows(ONE)
    breakers = Breakers(1, 5.0, clock)
    fail(breakers, clock, 1)
    breakers.keep({AGAIN})
    assert breakers.allows(ONE)


@settings(deadline=None)
@given(st.lists(st.sampled_from(["fail", "ok", "send", "end", "wait"]), max_size=60), st.integers(1, 4))
def test_it_never_stays_open(steps: list[str], limit: int) -> None:
    """In every case, a while after the last failure the worker gets a request again."""
    clock = ManualClock()
    breakers = Breakers(limit, 5.0, clock)
    for step in steps:
        clock.advance(1.0)
        if step == "fail":
            breakers.failed(ONE)
        elif step == "ok":
            breakers.succeeded(ONE)
        elif step == "send" and breakers.allows(ONE):
            breakers.sent(ONE, "r")
        elif step == "end":
            breakers.ended(ONE, "r")
        elif step == "wait":
            clock.advance(7.0)
    clock.advance(LONGEST_OPEN_S)
    breakers.ended(ONE, "r")
    assert breakers.allows(ONE)
