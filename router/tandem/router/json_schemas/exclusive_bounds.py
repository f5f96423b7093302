"""Moves exclusive whole bounds that llguidance allows by mistake: between 1 and 1.5, both exclusive, it allows 1."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from typing import Any, TypeGuard

from tandem.router.json_schemas.keywords import with_paths

STEP = 1e-9
"""Numbers so near to such a bound are left out."""


def with_moved_bounds(schema: Any) -> Any:
    """The schema itself, or a copy in which no exclusive whole bound is less than 1 away from an opposite bound. Bounds
    meet by allOf and $ref, too, so that all of the schema count."""
    lows, highs = _bounds(schema, "minimum", "exclusiveMinimum"), _bounds(schema, "maximum", "exclusiveMaximum")
    if not any(_moved(one, lows, highs) for _, one in with_paths(schema, "", str)):
        return schema
    made = copy.deepcopy(schema)
    for _, one in with_paths(made, "", str):
        for key, inclusive, bound in _moved(one, lows, highs):
            del one[key]
            other = one.get(inclusive)
            narrower = max if inclusive == "minimum" else min
            one[inclusive] = narrower(other, bound) if _is_number(other) else bound
    return made


def _bounds(schema: Any, *keys: str) -> list[float]:
    found = {one[key] for _, one in with_paths(schema, "", str) for key in keys if _is_number(one.get(key))}
    return sorted(found)


def _moved(schema: dict[str, Any], lows: list[float], highs: list[float]) -> list[tuple[str, str, float]]:
    """Exclusive bounds of a schema that have to move: keyword, the inclusive one in its place, and its number."""
    found = []
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if _is_whole(low):
        place = bisect_right(highs, low)
        if place < len(highs) and highs[place] < low + 1:
            found.append(("exclusiveMinimum", "minimum", low + max(STEP, math.ulp(low))))
    if _is_whole(high):
        place = bisect_left(lows, high)
        if place and lows[place - 1] > high - 1:
            found.append(("exclusiveMaximum", "maximum", high - max(STEP, math.ulp(high))))
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> TypeGuard[float]:
    """True for numbers that have others of less than 1 between them and the next whole one."""
    return _is_number(value) and abs(value) < 1 << 53 and value == int(value)
