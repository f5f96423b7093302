"""CI's slice of `make proof NAME=schemas`: schemas written here, tried in the same way."""

from collections.abc import Iterator
from typing import Any

import pytest

from proof.schemas.__main__ import Trial, summary

ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "minLength": 1, "maxLength": 10},
        "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["home", "work"]},
    },
    "required": ["street", "kind"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "number"}},
                       "required": ["value"], "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (ADDRESS, [{"street": "A", "kind": "home"}, {"street": "A", "number": None, "kind": "work"}],
     [{"kind": "home"}, {"street": "A", "kind": "boat"}, {"street": "", "kind": "home"}]),
    (TREE, [{"value": 1}, {"left": {"left": {"value": 2}, "value": 1.5}, "value": -1}], [{}, {"left": {}, "value": 1}]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024", "x"]),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, [[True], [True, False, True]],
     [[], [1]]),
    ({"type": "integer", "minimum": 5, "multipleOf": 5}, [5, 50], [0, 7]),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]}, [{"a": 1, "b": 2}], [{"a": "x"}]),
    ({"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, ["AB123"], ["ab123", "AB12"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial(seed=3, answers=2, tokens=120)
    yield made
    made.close()


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_an_accepted_schema_is_enforced(trial: Trial, schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    tests = [{"valid": True, "data": one} for one in valid] + [{"valid": False, "data": one} for one in invalid]
    found = trial.of({"schema": schema, "tests": tests})
    assert "broken" not in found, found
    assert (found["valid"], found["invalid"]) == (len(valid), len(invalid))


def test_a_broken_promise_is_seen(trial: Trial) -> None:
    found = trial.of({"schema": {"type": "integer"}, "tests": [{"valid": True, "data": "x"}]})
    assert found["broken"] == ['an instance is taken for False: "x"']


def test_refused_schemas_are_counted_by_place(trial: Trial) -> None:
    refused = trial.of({"schema": {"properties": {"a": {"not": {"pattern": "a"}}}}, "tests": []})
    assert refused["refused"] == "schema.properties.a.not"
    accepted = {"valid": 2, "invalid": 1, "ended": 2, "cut": 0}
    assert summary({"a": refused, "b": accepted}) == {
        "schemas": 2, "accepted": 1, "valid": 2, "invalid": 1, "ended": 2, "cut": 0, "refused": {"not": 1},
    }  # fmt: skip
