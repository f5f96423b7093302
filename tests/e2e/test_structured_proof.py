"""A slice of `make proof NAME=structured`: schemas written here, on one worker and while a decode worker is killed."""

from typing import Any

from proof.structured.__main__ import ARRANGEMENTS, REFERENCES, Trial

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "people": {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3},
    "date": {"type": "string", "format": "date"},
    "not-a-string": {"not": {"type": "string"}},
}


def test_answers_are_valid_and_the_same_after_a_kill() -> None:
    trial = Trial(SCHEMAS, seed=3, tokens=120)
    [(reference, _)] = trial.tried("mixed", list(SCHEMAS), {})
    assert not [one for one in reference.values() if "broken" in one]
    assert "stop" in {one["finish"] for one in reference.values()}
    other = {**reference, "date": {**reference["date"], "answer": "0"}}
    [(killed, disturbed)] = trial.tried("killed", list(SCHEMAS), other)
    assert killed.pop("date")["broken"].startswith("it is not the undisturbed answer")
    assert killed == {key: one for key, one in reference.items() if key != "date"}
    assert disturbed > 0


def test_each_reference_is_an_arrangement() -> None:
    assert {*REFERENCES, *REFERENCES.values()} == {*ARRANGEMENTS}
