"""The cases of a matrix that are drawn."""

from itertools import combinations, product

import pytest

from tests.plugins import seeds
from tests.plugins.drawn import FULL, draw, some_of

MATRIX = [dict(zip("abc", values, strict=True)) for values in product(range(6), range(4), range(2))]


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(seeds.VARIABLE, "7")
    monkeypatch.delenv(FULL, raising=False)
    return monkeypatch


def test_every_value_comes_with_as_few_cases_as_the_longest_parameter_has_values(seed: pytest.MonkeyPatch) -> None:
    for number in range(50):
        seed.setenv(seeds.VARIABLE, str(number))
        chosen = [MATRIX[index] for index in draw(MATRIX, 6, "any")]
        assert {name: {case[name] for case in chosen} for name in "abc"} == {
            "a": set(range(6)), "b": set(range(4)), "c": {0, 1}
        }  # fmt: skip


def test_half_of_the_cases_have_every_pair(seed: pytest.MonkeyPatch) -> None:
    chosen = [MATRIX[index] for index in draw(MATRIX, 26, "any")]
    pairs = {pair for case in chosen for pair in combinations(sorted(case.items()), 2)}
    assert pairs == {pair for case in MATRIX for pair in combinations(sorted(case.items()), 2)}


def test_a_seed_draws_the_same_and_another_seed_others(seed: pytest.MonkeyPatch) -> None:
    first = draw(MATRIX, 6, "any")
    assert draw(MATRIX, 6, "any") == first != draw(MATRIX, 6, "another test")
    seed.setenv(seeds.VARIABLE, "8")
    assert draw(MATRIX, 6, "any") != first


def test_many_seeds_draw_everything(seed: pytest.MonkeyPatch) -> None:
    drawn, some = set(), set()
    for number in range(60):
        seed.setenv(seeds.VARIABLE, str(number))
        drawn |= {*draw(MATRIX, 6, "any")}
        some |= {*some_of((4, 8), 1, "any")}
    assert len(drawn) > 0.9 * len(MATRIX)
    assert some == {4, 8}
