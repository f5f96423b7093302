"""Draw some cases of a large matrix: `@pytest.mark.drawn(12)` runs twelve cases of a parametrized test.

The seed of the run chooses them (`tests/plugins/seeds.py`), so each commit tests others. First come the cases with the
most values, and pairs of values, that no chosen case has yet. `@pytest.mark.drawn(1, of="long scenes")` draws one of
all tests with that name. `pytest --full` runs every case; `make proof NAME=matrices` does so for all with the mark.
"""

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import TypeVar
from zlib import crc32

import pytest

from tests.plugins import seeds

FULL = "TANDEM_TEST_FULL"
Value = TypeVar("Value")
Case = Mapping[str, int]
"""Parameter name → the number of its value."""


class Drawn:
    """Deselects the cases that are not drawn."""

    def __init__(self, *, is_full: bool) -> None:
        if is_full:
            os.environ[FULL] = "1"  # also for runners of pytest-xdist, and while tests are collected

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if FULL in os.environ:
            return
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        counts: dict[str, int] = {}
        for item in items:
            if mark := item.get_closest_marker("drawn"):
                name = mark.kwargs.get("of") or item.nodeid.partition("[")[0]
                groups[name].append(item)
                counts[name] = mark.args[0]
        left_out: set[pytest.Item] = set()
        for name, group in groups.items():
            cases = _cases(group)
            kinds = list(dict.fromkeys(cases))  # a repeated test is one case
            chosen = {kinds[index] for index in draw([dict(kind) for kind in kinds], counts[name], name)}
            left_out |= {item for item, case in zip(group, cases, strict=True) if case not in chosen}
        if left_out:
            config.hook.pytest_deselected(items=[item for item in items if item in left_out])
            items[:] = [item for item in items if item not in left_out]


def draw(cases: Sequence[Case], count: int, name: str) -> list[int]:
    """Indices of `count` cases, each with as much as can be that the ones before it lack."""
    left = list(range(len(cases)))
    Random(seeds.current() ^ crc32(name.encode())).shuffle(left)
    features = [_features(case) for case in cases]
    chosen: list[int] = []
    seen: set[Hashable] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda index: sum(weight for each, weight in features[index].items() if each not in seen))
        left.remove(best)
        chosen.append(best)
        seen |= features[best].keys()
    return chosen


def some_of(values: Sequence[Value], count: int, name: str) -> list[Value]:
    """The values of this run, in their order, where a whole module has to work with the same ones."""
    if FULL in os.environ:
        return list(values)
    return [values[index] for index in sorted(draw([{"value": index} for index in range(len(values))], count, name))]


def _cases(items: Sequence[pytest.Item]) -> list[tuple[tuple[str, int], ...]]:
    """Each item's parameters, with numbers in place of values: in the order in which the values first appear."""
    numbers: dict[str, dict[Hashable, int]] = defaultdict(dict)
    cases = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        values = {**(callspec.params if callspec else {}), "test": item.nodeid.partition("[")[0]}
        values.pop("repetition", None)
        cases.append(tuple(
            (name, numbers[name].setdefault(_key(value), len(numbers[name]))) for name, value in values.items()
        ))  # fmt: skip
    return cases


def _key(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _features(case: Case) -> dict[Hashable, float]:
    """Values and pairs of values, with what they count: a new value is worth more than any number of pairs."""
    values = sorted(case.items())
    return {**dict.fromkeys(combinations(values, 2), 1.0), **dict.fromkeys(values, float(len(values) ** 2))}
