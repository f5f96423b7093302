"""Counts the patterns that may have to hold for one text: llguidance takes four times as long for each further one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tandem.router.json_schemas.keywords import VALUES, pointed, with_paths

MAX_COMBINED = 9
"""A dozen take minutes, whatever the limits of llguidance are."""
_COMBINERS = {"$ref", "anyOf", "oneOf"}
_COMBINED = {"pattern", "patternProperties", "properties"}
_IGNORED = {*VALUES, "$defs", "definitions"}


def combining_path(schema: Any) -> str | None:
    """Path of the first part of a schema that combines more than MAX_COMBINED patterns; None if there is none."""
    if _patterns(schema, schema, VALUES) <= MAX_COMBINED:
        return None
    for path, one in with_paths(schema, "", str):
        is_combined = "allOf" in one or (_COMBINERS & one.keys() and _COMBINED & one.keys())
        if is_combined and _patterns(one, schema, _IGNORED) > MAX_COMBINED:
            return path
    return None


def _patterns(value: Any, root: Any, ignored: Collection[str]) -> int:
    """Patterns in a part of the schema `root`, with those of each definition that it refers to, up to one beyond
    MAX_COMBINED."""
    count, seen, left = 0, set(), [value]
    while left and count <= MAX_COMBINED:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            count += isinstance(one.get("pattern"), str)
            count += len(one["patternProperties"]) if isinstance(one.get("patternProperties"), dict) else 0
            reference = one.get("$ref")
            if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
                seen.add(reference)
                left.append(pointed(root, reference))
            left += [inner for key, inner in one.items() if key not in ignored]
    return count
