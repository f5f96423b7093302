"""CI's slice of `make proof NAME=grammars`: hostile grammars in a router's check and a worker's matcher."""

from collections.abc import Iterator

import pytest

from proof.grammars.__main__ import Subject, summary, wrongs

SEED = 5


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    made = Subject(SEED, None)
    yield made
    made.close()


def test_every_input_ends_within_its_bounds(subject: Subject) -> None:
    tried = {number: subject.attempt(number) for number in range(60)}
    found = summary(tried)
    assert not found["broken"], found["broken"]
    assert min(found["ends"][end] for end in ("refused", "followed")) > 5
    assert len({one["kind"] for one in tried.values()}) > 10


def test_a_broken_bound_is_seen() -> None:
    assert wrongs({"check_s": 99.0, "mib": 1.0}) == ["check_s is 99.000, and may be 5.0"]
    assert wrongs({"ended": "the process ended with -11"}) == ["the process ended with -11"]
    assert wrongs({"refused": "no", "check_s": 0.1}) == []
