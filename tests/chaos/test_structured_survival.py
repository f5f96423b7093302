"""Workers are killed in the middle of structured answers: these go on in their grammars, token for token as if nothing
had happened."""

import json
from typing import Any

import jsonschema_rs
import pytest

from tests.chaos.strikes import Cell, strike_until_hit
from tests.chaos.survivors import Bodies, undisturbed
from tests.cluster_fixture import cluster_fixture
from tools.running_cluster import Cluster

EXACT = ("--threads", "1", "--deterministic", "--dtype", "float32")
MAX_TOKENS = 300
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 30, "maxLength": 60},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 1000, "maximum": 9999}, "minItems": 12,
                  "maxItems": 16},
        "kind": {"anyOf": [{"enum": ["red", "green"]}, {"type": "object", "required": ["a"]}]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}  # fmt: skip

cluster = cluster_fixture("--prefill", "2", "--decode", "2", "--disaggregation", "always", *EXACT)


calm = cluster_fixture("--mixed", "1", *EXACT)
"""One worker that is not disturbed: its answers are right."""


def asks(salt: int) -> Bodies:
    """Structured answers of every kind, whole and streamed."""
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": False}}
    words = " ".join(f"word {number + salt}" for number in range(70))
    plain: dict[str, Any] = {
        "model": "tandem-tiny", "messages": [{"role": "user", "content": words}], "max_tokens": MAX_TOKENS,
        "response_format": wanted, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8,
    }  # fmt: skip
    whole = {key: value for key, value in plain.items() if not key.startswith("stream")}
    return {
        "seeded": {**plain, "seed": 11 + salt},
        "n=2": {**plain, "n": 2, "seed": 5 + salt},
        "penalties": {**plain, "frequency_penalty": 0.6, "seed": 2 + salt, "logprobs": True, "top_logprobs": 1},
        "whole": {**whole, "n": 2, "seed": 8 + salt},
    }


@pytest.mark.drawn(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed_in_the_middle_of_an_object(cluster: Cluster, calm: Cluster, role: str) -> None:
    bodies = asks(len(role))
    right = undisturbed(calm, bodies)
    ended = [choice for answer in right.values() for choice in answer.choices.values() if "stop" in choice.finishes]
    assert ended, "some answer ends by itself"
    for choice in ended:
        jsonschema_rs.validate(SCHEMA, json.loads(choice.text))
    strike_until_hit(cluster, Cell(role, role, "kill host"), bodies, right)
