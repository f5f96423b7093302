"""Grammars of structured outputs: what is built of each kind of constraint, and where refusals point."""

import asyncio
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tandem.core.errors import InvalidGrammarError
from tandem.core.output_grammar import MAX_GRAMMAR_CHARS, OutputGrammar
from tandem.router.json_schemas.keywords import MAX_NESTING
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import (
    MAX_CHOICES,
    MAX_GBNF_CHARS,
    MAX_GBNF_RULES,
    choice_grammar,
    regex_grammar,
    schema_grammar,
    tag_grammar,
    text_grammar,
)
from tests.unit.engine.bundled import MODEL

TOKENIZER = LLTokenizer(str(MODEL / "tokenizer.json"), eos_token=[1])
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(grammar: OutputGrammar, text: str) -> bool:
    """True if `text` is a whole answer."""
    checked = asyncio.run(check_grammar(grammar))
    matcher = LLMatcher(TOKENIZER, checked.text, log_level=0)
    return matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting()


def refused(make: Any) -> InvalidGrammarError:
    with pytest.raises(InvalidGrammarError) as caught:
        asyncio.run(check_grammar(make()))
    return caught.value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema_grammar(PERSON, "p"), '{"name": "Ann", "age": 3}', '{"age": 3, "name": "Ann"}'),
        (schema_grammar('{"type": "integer"}', "p"), "12", "1.5"),
        (schema_grammar(True, "p"), '[null, {"a": 1}]', "nul"),
        (schema_grammar({"type": "array"}, "p", whitespace=" ?"), "[1, 2]", "[1,  2]"),
        (regex_grammar("[0-9]{3}-[a-z]+", "p"), "123-ab", "12-ab"),
        (choice_grammar(["yes", "no/never", 'say "é"\n'], "p"), 'say "é"\n', "maybe"),
        (text_grammar('start: "a" NUMBER\nNUMBER: /[0-9]+/', "p"), "a12", "a"),
        (text_grammar('root ::= "a" [0-9]+', "p"), "a12", "b12"),
        (tag_grammar([("<f=a>", PERSON, "</f>")], ["<f="], "p"),
         'So: <f=a>{"name": "", "age": 1}</f> and', "So: <f=b>{}</f>"),
    ],
)  # fmt: skip
def test_a_grammar_accepts_what_it_is_made_of(grammar: OutputGrammar, good: str, bad: str) -> None:
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_whitespace_is_bounded_whatever_the_schema_asks_for() -> None:
    free = {**PERSON, "x-guidance": {"whitespace_pattern": " *", "lenient": True}}
    for schema in (PERSON, free):
        assert accepts(schema_grammar(schema, "p"), '{"name":"Ann",        "age":3}')
        assert not accepts(schema_grammar(schema, "p"), '{"name":"Ann",         "age":3}')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "p.uniqueItems"),
        ({"properties": {"a": {"items": {"not": {"pattern": "a"}}}}}, "p.properties.a.items.not"),
        ({"anyOf": [{"not": {"minLength": 1}}, {"if": {"pattern": "a"}, "then": {"maxLength": 1}}]}, "p.anyOf[1].if"),
        ({"properties": {"if": {"type": "integer"}, "b": {"contains": {}}}}, "p.properties.b.contains"),
        ({"$defs": {"a": {"$ref": "https://example.com/a.json"}}, "$ref": "#/$defs/a"}, "p.$defs.a.$ref"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "p.properties.a.$ref"),
        ({"properties": {"when": {"type": "string", "format": "moon"}}}, "p.properties.when.format"),
        ({"properties": {"a": {"type": "strin"}}}, "p.properties.a.type"),
        ({"properties": {"a": {"type": "string", "pattern": "^(?=a)b$"}}}, "p.properties.a.pattern"),
        ({"properties": {"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}}, "p.properties.a.oneOf"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "p.minItems"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "p.required"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "p.uniqueItems"),
        ({"enum": []}, "p"),
        (3, "p"),
        ("{", "p"),
        (nested(MAX_NESTING), "p"),
        ({"enum": ["x" * MAX_GRAMMAR_CHARS]}, "p"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_place(schema: Any, place: str) -> None:
    assert refused(lambda: schema_grammar(schema, "p")).param == place


def test_the_deepest_schema_is_accepted() -> None:
    assert accepts(schema_grammar(nested(MAX_NESTING - 1), "p"), "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({**PERSON, "additionalProperties": True}, "p.additionalProperties"),
        ({**PERSON, "required": ["name"]}, "p.required"),
        ({**PERSON, "properties": {"name": PERSON, "age": {"type": "object"}}},
         "p.properties.age.additionalProperties"),
        ({"type": "array", "items": {"anyOf": [{"properties": {"a": {}}}]}}, "p.items.anyOf[0].additionalProperties"),
    ],
)  # fmt: skip
def test_strict_schemas_close_their_objects(schema: Any, place: str) -> None:
    assert refused(lambda: schema_grammar(schema, "p", is_strict=True)).param == place
    assert accepts(schema_grammar(PERSON, "p", is_strict=True), '{"name": "", "age": 0}')


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: regex_grammar("(?=a)", "p"), "p"),
        (lambda: choice_grammar([], "p"), "p"),
        (lambda: choice_grammar(["a", ""], "p"), "p"),
        (lambda: choice_grammar(["a"] * (MAX_CHOICES + 1), "p"), "p"),
        (lambda: text_grammar("start: missing", "p"), "p"),
        (lambda: text_grammar("root ::= (", "p"), "p"),
        (lambda: text_grammar('root ::= "' + "a" * MAX_GBNF_CHARS + '"', "p"), "p"),
        (lambda: text_grammar("\n".join(f'root{n} ::= "a"' for n in range(MAX_GBNF_RULES + 1)), "p"), "p"),
        (lambda: tag_grammar([], ["<"], "p"), "p"),
        (lambda: tag_grammar([("<f=a>", PERSON, "")], ["<g", ""], "p"), "p.structures[0].begin"),
        (lambda: schema_grammar(PERSON, "p", whitespace=" " * 65), "p"),
        (lambda: schema_grammar(PERSON, "p", whitespace="("), "p"),
    ],
)
def test_other_grammars_are_refused_by_their_field(make: Any, place: str) -> None:
    assert refused(make).param == place


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*[{chr(97 + number)}-z]{{{20 + number}}}.*"}


def chained(combiner: str) -> Any:
    """Fourteen patterns that all hold for one text: llguidance would take minutes."""
    if combiner == "allOf":
        return {"allOf": [pattern(number) for number in range(14)]}
    if combiner == "$ref":
        defs = {f"a{number}": {**pattern(number), "$ref": f"#/$defs/a{number + 1}"} for number in range(13)}
        return {"$ref": "#/$defs/a0", "$defs": {**defs, "a13": pattern(13)}}
    whole: Any = pattern(0)
    for number in range(1, 14):
        whole = {**pattern(number), combiner: [whole, {"type": "integer"}]}
    if combiner == "oneOf":
        return {"type": "object", "properties": {"k": whole}}
    return whole


@pytest.mark.parametrize("combiner", ["allOf", "$ref", "anyOf", "oneOf"])
def test_patterns_that_would_take_minutes_to_combine_are_refused(combiner: str) -> None:
    schema = chained(combiner)
    in_lark = OutputGrammar(
        f"start: call\ncall: %json {json.dumps(schema)}".replace('"pattern"', '"\\u0070attern"'), "p"
    )
    in_tag = tag_grammar([("<f=a>", schema, "</f>")], ["<f="], "p")
    for grammar in (schema_grammar(schema, "p"), in_lark, in_tag):
        assert "more than 9 patterns" in str(refused(lambda grammar=grammar: grammar))


def test_patterns_apart_are_as_many_as_they_are() -> None:
    fields = {f"f{number}": {"type": "string", "pattern": "^[a-z]{2}$"} for number in range(40)}
    few = {"allOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}]}
    grammar = schema_grammar({"type": "object", "properties": {**fields, "few": few}}, "p")
    assert accepts(grammar, '{"f0":"ab","few":"abcz"}')
    assert not accepts(grammar, '{"few":"abc"}')


def test_a_long_grammar_is_checked_too() -> None:
    grammar = choice_grammar([f"choice {number}" for number in range(1000)], "p")
    assert accepts(grammar, "choice 999")
    assert refused(lambda: OutputGrammar(f"{grammar.text} | missing", "p")).param == "p"
