"""Fields of structured outputs become one grammar, named after the field that asked for it."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.core.errors import InvalidRequestError
from tandem.router.api.http.output_fields import OutputFields, output_grammar_of
from tandem.router.api.http.schemas import ChatRequest, CompletionRequest, chat_ask, completion_ask

NAMED: Any = {"name": "person", "schema": {"type": "object"}}
TAG: Any = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "response_format.json_schema.schema"),
        ({"response_format": TAG}, "response_format"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"type": "object"}', "whitespace_pattern": " ?"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "guided_grammar"),
    ],
)
def test_each_field_makes_a_grammar(fields: dict[str, Any], param: str) -> None:
    chat = chat_ask(ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], **fields))  # type: ignore[list-item]
    completion = completion_ask(CompletionRequest(model="m", prompt="Hi", **fields))
    assert chat.output_grammar is not None
    assert chat.output_grammar.param == param
    assert completion.output_grammar == chat.output_grammar


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": "", "guided_regex": "", "guided_choice": [], "guided_grammar": ""},
    ],
)
def test_what_asks_for_nothing_makes_none(fields: dict[str, Any]) -> None:
    assert output_grammar_of(OutputFields(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}}, "structured_outputs.structural_tag"),
    ],
)
def test_two_constraints_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        output_grammar_of(OutputFields(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "name": "a b"}}},
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "name": "a" * 65}}},
        {"structured_outputs": {"jsonschema": {}}},
        {"guided_choice": [1]},
    ],
)
def test_other_shapes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        OutputFields(**fields)
