"""Bounds beside the defaults, and what is outside of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, get_args, get_type_hints

import pytest

from tandem.core.bounds import Bound, bound_of, out_of_bounds
from tandem.core.config import ClusterConfig, RoleSection, SloSection


@pytest.mark.parametrize(
    ("bound", "inside", "outside", "words"),
    [
        (Bound(0), (0, 1e300), (-1, math.nan, math.inf), "0 or more"),
        (Bound(0, is_above=True), (0.001,), (0.0, math.nan), "more than 0"),
        (Bound(-1, 65535), (-1, 65535), (-2, 65536), "-1 to 65535"),
        (Bound(1024 * 1024), (1048576,), (1048575,), "1048576 or more"),
        (Bound(0, math.inf), (math.inf,), (math.nan,), "0 or more"),
    ],
)
def test_what_is_inside(bound: Bound, inside: tuple[float, ...], outside: tuple[float, ...], words: str) -> None:
    assert all(map(bound.holds, inside))
    assert not any(map(bound.holds, outside))
    assert str(bound) == words


def test_bounds_of_alternatives_are_found() -> None:
    assert bound_of(Annotated[int, "a word", Bound(3)] | None) == Bound(3)
    assert bound_of(int | None) is None


def test_every_number_in_every_section_is_named_by_its_place() -> None:
    config = ClusterConfig(decode=RoleSection(tp=0), slo={"chat": SloSection(itl_s=-1.0)})
    assert [(place, value) for place, value, _ in out_of_bounds(config)] == [
        ("decode.tp", 0),
        ("slo.chat.itl_s", -1.0),
    ]
    assert not list(out_of_bounds(ClusterConfig()))


def test_every_number_has_a_bound() -> None:
    open_ended: list[str] = []
    waiting: list[type[Any]] = [ClusterConfig]
    seen: set[type[Any]] = set()
    while waiting:
        section = waiting.pop()
        if section in seen:
            continue
        seen.add(section)
        for name, kind in get_type_hints(section, include_extras=True).items():
            parts = (kind, *get_args(kind))
            waiting += [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]
            plain = get_type_hints(section)[name]
            if {int, float} & {plain, *get_args(plain)} and bound_of(kind) is None:
                open_ended.append(f"{section.__name__}.{name}")
    assert open_ended == []
    assert len(seen) > 10
