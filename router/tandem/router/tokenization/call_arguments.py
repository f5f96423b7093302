"""Arguments of earlier calls, which models wrote: mostly JSON objects."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic_core import from_json, to_json


def object_of(arguments: str) -> dict[str, Any]:
    """The arguments that a model wrote as an object: of a call that was cut the fields that are complete, of what is no
    object none. Integers of more than 64 bits are fractions, as the writer of answers has no others."""
    try:
        read = from_json(arguments or "{}", allow_partial=True)
        value = orjson.loads(to_json(read, inf_nan_mode="null"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
