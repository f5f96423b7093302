"""Keywords of JSON Schema by what their values are, and references inside a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Names to schemas."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
VALUES = ("enum", "const", "default", "examples", "example")
RESTRICTIONS = frozenset((
    *LISTS, *SCHEMAS, "properties", "patternProperties", "dependentSchemas", "dependencies", "dependentRequired",
    "type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems",
    "minContains", "maxContains", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref", "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Keywords that may forbid a value; all others are ignored, as llguidance and JSON Schema do."""
MAX_NESTING = 64
"""Lists and objects inside each other in a schema."""
TYPES = ("null", "boolean", "object", "array", "number", "string")


def pointed(root: Any, reference: str) -> Any:
    """The part of a schema that a reference such as "#/$defs/a" points to; None if there is none."""
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name[:6]) < len(root):
            root = root[int(name[:6])]
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


def types_of(schema: dict[str, Any]) -> set[str]:
    """Types that the keyword `type` leaves, integers as numbers."""
    given = schema.get("type")
    if given is None:
        return set(TYPES)
    names = given if isinstance(given, list) else [given]
    return {"number" if name == "integer" else str(name) for name in names}


def type_of(value: Any) -> str:
    """Type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return names.get(type(value), "null")


def is_equal(one: Any, other: Any) -> bool:
    """True if two values are equal in JSON, where true is not 1."""
    if type_of(one) != type_of(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def is_deeper(value: Any, most: int) -> bool:
    """True if more than so many lists and objects are inside each other."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def with_paths(schema: Any, path: str, shorten: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, itself first, with its path. `shorten` makes names of properties fit for errors."""
    if isinstance(schema, list):
        for place, one in enumerate(schema):
            yield from with_paths(one, f"{path}[{place}]", shorten)
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            for name, one in value.items():
                yield from with_paths(one, f"{path}.{key}.{shorten(name)}", shorten)
        elif key not in VALUES:
            yield from with_paths(value, f"{path}.{key}", shorten)
