"""Drafts are chosen by what rows cost and how often offers hold."""

from collections.abc import Callable

import pytest

from tandem.core import metric_names as names
from tandem.core.span_copy import DraftSource, SpanCopy
from tandem.engine.draft_controller import MOST_DRAFTS, DraftController

TEXT = list(range(1000))


def controller_of(cost: Callable[[int], float], rate: float, matched: int = 16) -> DraftController:
    """One that has seen steps of 1 to 16 rows, and offers that hold at a `rate`."""
    made = DraftController()
    for step in range(400):
        made.observe_step(step % 16 + 1, cost(step % 16 + 1))
        for least in range(17):
            made.observe_offer(DraftSource.PREDICTION, least, has_held=step % 100 < 100 * rate)
    assert matched <= 16
    return made


def span_of(agreed: int) -> SpanCopy:
    span = SpanCopy(TEXT)
    for token in TEXT[:agreed]:
        span.add(token)
    return span


def test_drafts_that_hold_are_taken_as_far_as_there_is_room() -> None:
    made = controller_of(lambda rows: 1 + 0.05 * rows, 1.0)
    assert made.counts(1, [(span_of(20), MOST_DRAFTS)], 15) == [15]
    assert made.counts(1, [(span_of(20), 4)], 15) == [4]
    assert made.counts(1, [(span_of(20), MOST_DRAFTS)], 6) == [6]


def test_rows_that_cost_their_own_time_are_not_drafted() -> None:
    made = controller_of(lambda rows: 0.01 + rows, 0.6)
    assert made.counts(1, [(span_of(0), MOST_DRAFTS)], 15) == [0]


def test_offers_that_do_not_hold_are_not_drafted() -> None:
    made = controller_of(lambda rows: 1 + 0.2 * rows, 0.05)
    assert made.counts(1, [(span_of(0), MOST_DRAFTS)], 15) == [0]
    for _ in range(2000):
        made.observe_offer(DraftSource.PREDICTION, 0, has_held=True)
    assert made.counts(1, [(span_of(0), MOST_DRAFTS)], 15) > [0], "they came back without being tried"


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("row", [0.02, 0.1, 0.4])
def test_the_count_is_the_best_one(rate: float, row: float) -> None:
    """Beside all others of a chain with an equal rate everywhere: tokens a second within 2 %."""
    made, span = controller_of(lambda rows: 1 + row * rows, rate), span_of(0)
    (count,) = made.counts(2, [(span, MOST_DRAFTS)], 14)

    def speed(drafts: int) -> float:
        return (2 + sum(rate**place for place in range(1, drafts + 1))) / (1 + row * (2 + drafts))

    assert speed(count) >= 0.97 * max(map(speed, range(15)))


def test_the_choice_that_is_trusted_gets_the_room() -> None:
    made = controller_of(lambda rows: 1 + 0.05 * rows, 0.6)
    wrong = SpanCopy([*TEXT[:10], 1, *TEXT[11:]])
    for token in (*TEXT[:3], 77, 78, 79, TEXT[4], TEXT[5]):
        wrong.add(token)
    first, second = made.counts(2, [(wrong, MOST_DRAFTS), (span_of(30), MOST_DRAFTS)], 14)
    assert 0 < first + second <= 14
    assert second > first


def test_counters() -> None:
    made = DraftController()
    made.count_drafts(5, 2)
    made.count_drafts(3, 3)
    assert made.counters() == {
        names.SPEC_DRAFTS: 2.0, names.SPEC_DRAFT_TOKENS: 8.0, names.SPEC_ACCEPTED_TOKENS: 5.0,
    }  # fmt: skip
