"""Shortest remaining work first, and no request is overtaken for ever."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import ConfigError
from tandem.core.prefill_queue import (
    FIRST_COME,
    MAX_ROWS,
    UNMEASURED,
    PrefillSpeed,
    QueuedWork,
    QueueRules,
    attended,
    condensed,
)

RULES = QueueRules(stretch=10.0, max_overtake_s=30.0)
SECONDS = st.floats(0, 1000)


def due(arrived_s: float, remaining_s: float, **more: float) -> float:
    return RULES.due_s(arrived_s=arrived_s, remaining_s=remaining_s, now_s=more.pop("now_s", arrived_s), **more)


def test_short_work_goes_first_until_it_comes_too_late() -> None:
    long = due(100.0, 1.0)
    assert due(101.0, 0.1) < long < due(110.0, 0.1)
    assert due(100.0, 50.0) == 130.0, "the longest is put off no further"


def test_a_deadline_comes_before_the_own_due_time() -> None:
    assert due(100.0, 1.0, deadline_s=104.0) == 104.0
    assert due(100.0, 1.0, deadline_s=500.0) == 110.0
    assert due(100.0, 1.0, deadline_s=101.0) == 101.0, "just in time"
    assert due(100.0, 1.0, deadline_s=100.5) == math.inf, "nobody would see the answer"
    assert due(100.0, 1.0, now_s=104.0, deadline_s=104.5) == math.inf, "it waited for too long"


def test_first_come_first_served() -> None:
    assert FIRST_COME.due_s(arrived_s=5.0, remaining_s=99.0, now_s=7.0, deadline_s=6.0) == 5.0


def test_a_worker_that_never_computed_takes_a_second_for_5000_tokens_whatever_is_before_them() -> None:
    assert UNMEASURED.seconds(5000, 1e9) == 1.0
    assert PrefillSpeed(tokens_per_s=100.0, context_s=0.5).seconds(200, 6.0) == 2.0 + 3.0


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_chunks_look_at_what_the_whole_looks_at(one: int, two: int, three: int) -> None:
    """However a prompt is cut; of n tokens each looks at those before it, which are between n - 1 and n on average."""
    start, middle, end = sorted((one, two, three))
    assert attended(start, middle) + attended(middle, end) == attended(start, end)
    pairs = sum(range(start, end))
    assert pairs <= attended(start, end) <= pairs + (end - start)


@pytest.mark.parametrize("wrong", [{"stretch": -1.0}, {"stretch": math.inf}, {"max_overtake_s": math.nan}])
def test_impossible_rules(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"queue_{next(iter(wrong))}"):
        QueueRules(**wrong)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_less_work_is_never_due_later(arrived_s: float, one_s: float, other_s: float, deadline_s: float) -> None:
    less, more = sorted((one_s, other_s))
    assert due(arrived_s, less, deadline_s=deadline_s) <= due(arrived_s, more, deadline_s=deadline_s)


@given(SECONDS, SECONDS, st.floats(30.001, 100), SECONDS)
def test_nobody_who_comes_after_the_bound_overtakes(
    first_s: float, long_s: float, later_s: float, any_s: float
) -> None:
    assert due(first_s, long_s) < due(first_s + later_s, any_s)


def tokens_ahead(queue: Iterable[QueuedWork], due_s: float) -> int:
    """Tokens that are computed before a prompt that arrives now and is due at `due_s`."""
    return sum(work.tokens for work in queue if work.due_s <= due_s)


def requests_behind(queue: Iterable[QueuedWork], due_s: float) -> int:
    """Prompts that such a prompt puts off."""
    return sum(work.requests for work in queue if work.due_s > due_s)


WORK = st.builds(QueuedWork, st.floats(-50, 50), st.integers(1, 9000), st.integers(1, 3), st.integers(0, 10**6))


QUEUES = st.integers(0, 3 * MAX_ROWS).flatmap(lambda size: st.lists(WORK, min_size=size, max_size=size))


@given(QUEUES, st.floats(-60, 60))
def test_a_condensed_queue_forgets_nothing_and_never_promises_less_to_wait(queue: list[QueuedWork], at: float) -> None:
    rows = condensed(queue)
    assert len(rows) <= MAX_ROWS
    assert [row.due_s for row in rows] == sorted(row.due_s for row in rows)
    assert sum(row.tokens for row in rows) == sum(work.tokens for work in queue)
    assert sum(row.requests for row in rows) == sum(work.requests for work in queue)
    assert sum(row.attended for row in rows) == sum(work.attended for work in queue)
    assert tokens_ahead(rows, at) >= tokens_ahead(queue, at)
    assert requests_behind(rows, at) <= requests_behind(queue, at)
    if len(queue) <= MAX_ROWS:
        assert rows == sorted(queue)


def test_a_row_that_says_no_more_is_one_prompt_with_nothing_before_it() -> None:
    assert QueuedWork(1.0, 5) == (1.0, 5, 1, 0)


@dataclass
class Prompt:
    arrived_s: float
    left_s: float
    is_long: bool = False


def test_a_long_prompt_among_many_short_ones_waits_no_longer_than_the_bound_says() -> None:
    """A server that is never idle, short prompts without end: the long one is done once those are that came within
    `max_overtake_s` of it."""
    rules, step_s, now_s = QueueRules(stretch=20.0, max_overtake_s=5.0), 0.05, 0.0
    long = Prompt(0.0, 1.0, is_long=True)
    queue, arrivals = [long], 0
    while long.left_s > 0:
        while arrivals * 0.1 <= now_s:  # as much work as can be done
            queue.append(Prompt(arrivals * 0.1, 0.1))
            arrivals += 1
        queue.sort(key=lambda one: rules.due_s(arrived_s=one.arrived_s, remaining_s=one.left_s, now_s=now_s))
        queue[0].left_s -= step_s
        now_s += step_s
        if queue[0].left_s <= 1e-9:
            queue.pop(0)
    assert 3.5 < now_s <= rules.max_overtake_s + 1.0 + 2 * step_s
