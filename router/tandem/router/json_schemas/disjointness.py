"""Decides whether two schemas exclude each other: no value fits both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.router.json_schemas.evaluation import Evaluation
from tandem.router.json_schemas.keywords import TYPES, pointed, type_of, types_of

MAX_STEPS = 4_000
"""Of one schema; beyond them nothing is known to exclude anything."""
MAX_DEPTH = 8


class Disjointness:
    """Compares parts of the schema `root`. False says only that exclusion is not known."""

    def __init__(self, root: Any, evaluation: Evaluation) -> None:
        self._root, self._evaluation, self._steps = root, evaluation, MAX_STEPS

    def excludes(self, one: Any, other: Any, *around: Any, depth: int = 0) -> bool:
        """True if no value fits all of these, the two and those `around` them."""
        self._steps -= 1
        if self._steps < 0 or depth > MAX_DEPTH:
            return False
        if False in (one, other, *around):
            return True
        first, second = list(self._parts(one, set())), list(self._parts(other, set()))
        shared = [part for schema in around for part in self._parts(schema, set())]
        parts = [*first, *second, *shared]
        types = set(TYPES).intersection(*(self._types(part) for part in parts))
        if not types or self._is_by_values(parts):
            return True
        if types == {"object"} and self._is_by_property(parts, depth):
            return True
        return any(
            all(self.excludes(option, other, one, *around, depth=depth + 1) for option in options)
            for part in first for options in _options(part)
        ) or any(
            all(self.excludes(one, option, other, *around, depth=depth + 1) for option in options)
            for part in second for options in _options(part)
        )  # fmt: skip

    def _parts(self, schema: Any, seen: set[str]) -> Iterator[dict[str, Any]]:
        """Schemas that have to hold together: one, those of its allOf, and those that it refers to."""
        self._steps -= 1
        if not isinstance(schema, dict) or self._steps < 0:
            return
        yield schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in seen and len(seen) < 64:
            seen.add(reference)
            yield from self._parts(pointed(self._root, reference), seen)
        every = schema.get("allOf")
        for one in every if isinstance(every, list) else ():
            yield from self._parts(one, seen)

    def _types(self, part: dict[str, Any]) -> set[str]:
        types, values = types_of(part), _values(part)
        return types if values is None else types & {type_of(value) for value in values}

    def _is_by_values(self, parts: list[dict[str, Any]]) -> bool:
        """True if each value that one of them lists fits one of the others not."""
        for part in parts:
            values = _values(part)
            if values is not None and len(values) <= 64:
                self._steps -= len(values)
                if all(any(self._evaluation.holds(one, value) is False for one in parts) for value in values):
                    return True
        return False

    def _is_by_property(self, parts: list[dict[str, Any]], depth: int) -> bool:
        """True if a property has to be there whose schemas exclude each other."""
        required = dict.fromkeys(
            name for part in parts if isinstance(part.get("required"), list) for name in part["required"]
            if isinstance(name, str)
        )  # fmt: skip
        for name in required:
            schemas = [one for part in parts if (one := _property(part, name)) is not True]
            self._steps -= len(schemas)
            if False in schemas:
                return True
            for place, one in enumerate(schemas):
                if any(self.excludes(one, other, depth=depth + 1) for other in schemas[:place]):
                    return True
        return False


def _property(part: dict[str, Any], name: Any) -> Any:
    listed, patterns = part.get("properties", {}), part.get("patternProperties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    return True if patterns else part.get("additionalProperties", True)


def _values(part: dict[str, Any]) -> list[Any] | None:
    """The only values that fit, if a schema lists them."""
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _options(part: dict[str, Any]) -> Iterator[list[Any]]:
    for key in ("anyOf", "oneOf"):
        if isinstance(part.get(key), list) and len(part[key]) <= 16:
            yield part[key]
