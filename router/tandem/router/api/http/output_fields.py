"""Fields of requests that constrain an answer's form: OpenAI's `response_format`, vLLM's `structured_outputs`, and the
`guided_*` names that older clients of vLLM send. A request has at most one constraint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError

from tandem.core.errors import InvalidGrammarError, InvalidRequestError
from tandem.core.output_grammar import MAX_GRAMMAR_CHARS, OutputGrammar
from tandem.router.api.http.strict_models import FIRST_ERROR, Strict
from tandem.router.serving.output_grammar import (
    MAX_CHOICES,
    MAX_TAGS,
    choice_grammar,
    regex_grammar,
    schema_grammar,
    tag_grammar,
    text_grammar,
)

MAX_KEYS = 1024
"""Of the outermost object of a schema."""
_OBJECT = {"type": "object"}


Schema = Annotated[dict[str, Any], Field(max_length=MAX_KEYS)]
Text = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Text], Field(max_length=MAX_CHOICES), FIRST_ERROR]


class PlainTextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class NamedSchema(Strict):
    name: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    described: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None
    description: Text | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema):
    """As the Responses API writes it."""

    type: Literal["json_schema"]


class TagStructure(Strict):
    begin: Text
    described: Annotated[Schema, Field(alias="schema")]
    end: Text


class StructuralTag(Strict):
    """Free text with tagged parts; each tag begins with one of the triggers."""

    type: Literal["structural_tag"]
    structures: Annotated[list[TagStructure], Field(max_length=MAX_TAGS), FIRST_ERROR]
    triggers: Annotated[list[Text], Field(max_length=MAX_TAGS), FIRST_ERROR]


ResponseFormat = Annotated[
    PlainTextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTag, Field(discriminator="type")
]


FlatFormat = Annotated[PlainTextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    described: Annotated[Text | Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: StructuralTag | Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None


class OutputFields(Strict):
    """Fields that both APIs share."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None


CONSTRAINTS = frozenset(OutputFields.model_fields)


def output_grammar_of(body: OutputFields) -> OutputGrammar | None:
    """The one constraint of a request; InvalidRequestError for several, InvalidGrammarError for one that makes no
    grammar."""
    given = [(param, kind, value) for param, kind, value in _constraints(body) if value is not None]
    if not given:
        return None
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        why = f"{first} constrains the answer too"
        raise InvalidRequestError(f"{second} cannot be used", why=why, todo="give one of them", param=second)
    param, kind, value = given[0]
    whitespace = body.structured_outputs.whitespace_pattern if body.structured_outputs is not None else None
    return constraint_grammar(kind, value, param, whitespace)


def constraint_grammar(kind: str, value: Any, param: str, whitespace: str | None) -> OutputGrammar | None:
    """The grammar of a constraint of one `kind`: a field of `StructuredOutputs`, or "format". `whitespace`: see
    `schema_grammar`."""
    if kind == "json":
        return schema_grammar(value, param, whitespace=whitespace)
    if kind == "json_object":
        return schema_grammar(_OBJECT, param, whitespace=whitespace) if value else None
    return _MAKERS[kind](value, param)


def format_grammar(wanted: ResponseFormat | FlatFormat, param: str) -> OutputGrammar | None:
    """The grammar of a response format; None = any text."""
    if isinstance(wanted, JsonObjectFormat):
        return schema_grammar(_OBJECT, param)
    if isinstance(wanted, JsonSchemaFormat):
        named = wanted.json_schema
        return schema_grammar(named.described, f"{param}.json_schema.schema", is_strict=bool(named.strict))
    if isinstance(wanted, FlatSchemaFormat):
        return schema_grammar(wanted.described, f"{param}.schema", is_strict=bool(wanted.strict))
    return _tagged(wanted, param) if isinstance(wanted, StructuralTag) else None


def _constraints(body: OutputFields) -> Iterator[tuple[str, str, Any]]:
    """Each field that may constrain the answer, with its kind and value; None = it does not. Empty values of the older
    names ask for nothing."""
    wanted = body.response_format
    yield "response_format", "format", None if isinstance(wanted, PlainTextFormat) else wanted
    for kind, name in _GUIDED:
        yield name, kind, getattr(body, name) or None
    outputs = body.structured_outputs
    if outputs is None:
        return
    yield "structured_outputs.json", "json", outputs.described
    yield "structured_outputs.json_object", "json_object", outputs.json_object or None
    for kind in ("regex", "choice", "grammar", "structural_tag"):
        yield f"structured_outputs.{kind}", kind, getattr(outputs, kind)


def _tagged(wanted: StructuralTag | str, param: str) -> OutputGrammar:
    if isinstance(wanted, str):
        try:
            wanted = StructuralTag.model_validate(orjson.loads(wanted))
        except (ValidationError, orjson.JSONDecodeError) as error:
            why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise InvalidGrammarError(f"{param} is no structural tag", why=why, param=param) from None
    return tag_grammar([(tag.begin, tag.described, tag.end) for tag in wanted.structures], wanted.triggers, param)


_GUIDED = (
    ("json", "guided_json"), ("regex", "guided_regex"), ("choice", "guided_choice"), ("grammar", "guided_grammar"),
)  # fmt: skip
_MAKERS: dict[str, Callable[[Any, str], OutputGrammar | None]] = {
    "format": format_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": text_grammar,
    "structural_tag": _tagged,
}
