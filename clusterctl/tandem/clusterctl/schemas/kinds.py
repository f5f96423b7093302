"""The shape of every document that `clusterctl -o json` prints, by kind. `schema` gives it as JSON Schema.

Keys stay; new ones may come. A test compares every kind with a command's real output. Seconds end in `_s`,
numbers of 64 bits are texts, and `None` is an unknown value.
"""

from __future__ import annotations

from typing import Any, Final

from tandem.clusterctl.schemas.gateway import API
from tandem.clusterctl.schemas.inspect import LOOKING
from tandem.clusterctl.schemas.kv import TRANSFER
from tandem.clusterctl.schemas.lifecycle import RUNNING
from tandem.clusterctl.schemas.operate import CHANGING
from tandem.clusterctl.schemas.planning import PLANNED
from tandem.clusterctl.schemas.reports import REPORTS

KINDS: Final[dict[str, Any]] = {
    kind.__name__.removesuffix("Document"): kind
    for kind in (*LOOKING, *TRANSFER, *API, *REPORTS, *CHANGING, *RUNNING, *PLANNED)
}  # fmt: skip
"""Kind → the content of its documents beside `apiVersion` and `kind`."""


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a document of `kind`; KeyError if there is none. It forbids unknown keys everywhere."""
    import msgspec

    from tandem.clusterctl.output import API_VERSION

    (found,), parts = msgspec.json.schema_components((KINDS[kind],))
    top = parts.pop(found["$ref"].rpartition("/")[2])
    head = {"apiVersion": {"const": API_VERSION}, "kind": {"const": kind}}
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **top,
        "properties": {**head, **top["properties"]},
        "required": [*head, *top["required"]],
        "$defs": parts,
    }
    for part in (whole, *parts.values()):
        part["additionalProperties"] = False
    return whole
