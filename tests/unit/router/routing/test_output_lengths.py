"""How long answers are, learnt from those that ended."""

from __future__ import annotations

import pytest

from tandem.router.routing.output_lengths import ASSUMED_TOKENS, AnswerLengths


def test_the_first_answers_do_not_decide_alone_and_later_ones_count_most() -> None:
    lengths = AnswerLengths()
    assert lengths.mean("m") == ASSUMED_TOKENS
    lengths.ended("m", 1)
    assert 100 < lengths.mean("m") < ASSUMED_TOKENS
    for _ in range(1000):
        lengths.ended("m", 500)
    assert lengths.mean("m") == pytest.approx(500, rel=0.1)
    for _ in range(300):
        lengths.ended("m", 20)
    assert lengths.mean("m") < 100
    assert lengths.mean("another") == ASSUMED_TOKENS
