"""Counts pairs of listed values that llguidance would compare: those of an allOf, wherever in a document they meet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.router.json_schemas.keywords import pointed, with_paths

MAX_PAIRS = 4_000
"""Each takes about 0.1 ms, outside llguidance's limits."""
_MAX_VISITS = 10_000
_MAX_PLACES = 100_000
"""Definitions that refer to each other twice double the places, and a document of 3 KB has 8 million of them. Each
copy of one counts. Behind so many, a part keeps the place with the most pairs alone."""
_MAX_DEPTH = 128
_Values = dict[tuple[str, ...], tuple[int, int]]
"""Place in a value → alternatives there, and pairs of them that are compared."""


def crossing_path(schema: Any) -> str | None:
    """Path of the first part of a schema that compares more than MAX_PAIRS pairs of values; None if there is none."""
    if not _Counting(schema).is_crossed(schema):
        return None
    counting = _Counting(schema)
    return max((path for path, one in with_paths(schema, "", str) if counting.is_crossed(one)), key=len, default="")


class _Counting:
    """Counts in the schema `root`, in a bounded number of visits and places."""

    def __init__(self, root: Any) -> None:
        self._root, self._left, self._places = root, _MAX_VISITS, _MAX_PLACES
        self._known: dict[str, _Values] = {}

    def is_crossed(self, schema: Any) -> bool:
        """True if a part of the schema compares more than MAX_PAIRS."""
        return any(pairs > MAX_PAIRS for _, pairs in self._values(schema, frozenset(), 0).values())

    def _values(self, schema: Any, seen: frozenset[str], depth: int) -> _Values:
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0 or depth > _MAX_DEPTH:
            return {}
        depth += 1
        listed = schema.get("enum")
        found: _Values = {(): (len(listed), 0)} if isinstance(listed, list) else {}
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                _cross(found, _added(self._bounded(one, seen, depth) or {(): (1, 0)} for one in options))
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            _cross(found, self._bounded(one, seen, depth))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
            if reference not in self._known:
                target = pointed(self._root, reference)
                self._known[reference] = self._values(target, seen | {reference}, depth)
            self._known[reference] = self._kept(self._known[reference])
            _cross(found, self._known[reference])
        properties = schema.get("properties")
        inner = dict(properties) if isinstance(properties, dict) else {}
        inner |= {f"*{key}": schema[key] for key in ("items", "additionalProperties") if key in schema}
        for name, one in inner.items():
            _cross(found, {(name, *path): count for path, count in self._bounded(one, seen, depth).items()})
        return found

    def _bounded(self, schema: Any, seen: frozenset[str], depth: int) -> _Values:
        return self._kept(self._values(schema, seen, depth))

    def _kept(self, values: _Values) -> _Values:
        """`values`, to be copied; of too many the one with the most pairs."""
        if len(values) > max(1, self._places):
            values = dict([max(values.items(), key=lambda item: item[1][1])])
        self._places -= len(values)
        return values


def _cross(found: _Values, other: _Values) -> None:
    """Add `other` to `found`. Both have to hold: each value of one is compared with each of the other."""
    for path, (second, after) in other.items():
        first, before = found.get(path, (second, 0))
        pairs = first * second if path in found and min(first, second) > 1 else 0
        found[path] = (min(first, second), before + after + pairs)


def _added(options: Iterable[_Values]) -> _Values:
    """One of them has to hold."""
    made: _Values = {}
    for one in options:
        for path, (values, pairs) in one.items():
            before = made.get(path, (0, 0))
            made[path] = (before[0] + values, before[1] + pairs)
    return made
