"""Finds numbers that end the process: llguidance makes an endless recursion of an integer that is -2^63 as a float."""

from __future__ import annotations

from typing import Any

from tandem.router.json_schemas.keywords import with_paths

LOWEST = -9_223_372_036_854_700_000
"""Numbers below are refused as values and as upper bounds; as lower bounds they are no matter."""


def lowest_path(schema: Any) -> str | None:
    """Path of the first value or upper bound below LOWEST; None if there is none."""
    for path, one in with_paths(schema, "", str):
        for key in ("const", "enum", "maximum", "exclusiveMaximum"):
            if key in one and _has_lower(one[key]):
                return f"{path}.{key}"
    return None


def _has_lower(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, int | float) and one < LOWEST:
            return True
    return False
