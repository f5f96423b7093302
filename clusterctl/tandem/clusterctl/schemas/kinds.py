"""The shape of every document that `clusterctl -o json` prints, by kind. `schema` gives it as JSON Schema.

A shape is a TypedDict, or the record that the document is made of. Keys stay; new ones may come. A test compares every
kind with a command's real output. Seconds end in `_s`, numbers of 64 bits are texts, and `None` is an unknown value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec.inspect

from tandem.clusterctl.inspect.log_files import ParsedRecord
from tandem.clusterctl.output import API_VERSION
from tandem.clusterctl.schemas.inspect import INSPECTING
from tandem.clusterctl.schemas.operate import OPERATING
from tandem.clusterctl.schemas.planning import PLANNED
from tandem.clusterctl.schemas.reports import REPORTS
from tandem.core import admin_schema

_ADMIN: Final = ("RoutingPolicy", "RoutingDecision", "SloClasses", "ApiKeys", "ApiKeyDocument", "TraceDocument")
_SHAPES: Final[tuple[Any, ...]] = (*INSPECTING, *OPERATING, *PLANNED, *REPORTS)
KINDS: Final[dict[str, Any]] = {
    **{kind.__name__.removesuffix("Document"): kind for kind in _SHAPES},
    **{name.removesuffix("Document"): getattr(admin_schema, name) for name in _ADMIN},
    "LogRecord": ParsedRecord,
}
"""Kind → the content of its documents beside `apiVersion` and `kind`."""


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a document of `kind`; KeyError if there is none. It forbids unknown keys everywhere."""
    (found,), parts = msgspec.json.schema_components((KINDS[kind],))
    for record in _records(msgspec.inspect.type_info(KINDS[kind])):  # written with all its fields, defaults or not
        parts[record]["required"] = list(parts[record]["properties"])
    for part in parts.values():
        if "properties" in part:
            part["additionalProperties"] = False
    top = parts.pop(found["$ref"].rpartition("/")[2])
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "properties": {**head, **top["properties"]},
        "required": [*head, *top["required"]],
        "$defs": parts,
    }


def _records(info: Any) -> Iterator[str]:
    """Yield the names of the dataclasses in a msgspec type, at any depth."""
    if isinstance(info, tuple):
        for one in info:
            yield from _records(one)
    elif hasattr(info, "__struct_fields__"):
        if isinstance(info, msgspec.inspect.DataclassType):
            yield info.cls.__name__
        yield from _records(tuple(getattr(info, name) for name in info.__struct_fields__))
