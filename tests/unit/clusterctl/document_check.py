"""Documents that `clusterctl` prints, held against the schema of their kind."""

import json
from typing import Any

import jsonschema_rs

from tandem.clusterctl.schemas.kinds import schema


def checked(text: str, kind: str) -> dict[str, Any]:
    """Return the one document in `text`; AssertionError unless it fits the schema of `kind`."""
    found: dict[str, Any] = json.loads(text)
    assert found["kind"] == kind, found["kind"]
    assert [str(error) for error in jsonschema_rs.Draft202012Validator(schema(kind)).iter_errors(found)] == []
    return found
