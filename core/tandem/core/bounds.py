"""Bounds of settings: declared beside the defaults, in the types of fields; one walk finds values out of bounds.

port: Annotated[int, Bound(0, 65535)] = 8000
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """A number from `least` to `most`; with `is_above`, `least` itself is too little. Never NaN."""

    least: float
    most: float = sys.float_info.max
    is_above: bool = False

    def holds(self, value: float) -> bool:
        return (value > self.least if self.is_above else value >= self.least) and value <= self.most

    def __str__(self) -> str:
        """Such as "0 or more"."""
        if self.is_above:
            return f"more than {self.least:g}"
        has_end = self.most < sys.float_info.max
        return f"{self.least:.0f} to {self.most:.0f}" if has_end else f"{self.least:.0f} or more"


def bound_of(kind: Any) -> Bound | None:
    """The bound in the type of a field, also in one of its alternatives (`… | None`)."""
    for part in (*getattr(kind, "__metadata__", ()), *map(bound_of, typing.get_args(kind))):
        if isinstance(part, Bound):
            return part
    return None


def out_of_bounds(record: Any, place: str = "") -> Iterator[tuple[str, float, Bound]]:
    """(place, value, bound) of every number in the dataclass `record`, and in those inside it, that is outside.

    A place is written as in "router.port", "slo.chat.ttft_s" or "models[0].mixed"; None is no number.
    """
    kinds = typing.get_type_hints(type(record), include_extras=True)
    for field in dataclasses.fields(record):
        name, value, bound = f"{place}{field.name}", getattr(record, field.name), bound_of(kinds[field.name])
        if bound is not None and value is not None and not bound.holds(value):
            yield name, value, bound
        for inner, found in _records(name, value):
            yield from out_of_bounds(found, f"{inner}.")


def _records(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    named: Mapping[str, Any] = {name: value}
    if isinstance(value, Mapping):
        named = {f"{name}.{key}": one for key, one in value.items()}
    elif isinstance(value, tuple):
        named = {f"{name}[{number}]": one for number, one in enumerate(value)}
    for inner, one in named.items():
        if dataclasses.is_dataclass(one):
            yield inner, one
