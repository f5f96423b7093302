"""Rewriting of JSON schemas: what fits the result fits the schema, and the other way round where nothing is left out.

The package `jsonschema_rs` says what fits a schema, llguidance what fits the result.
"""

import asyncio
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft7Validator, Draft202012Validator

from proof.schemas.spellings import Spelling
from tandem.core.errors import InvalidGrammarError
from tandem.router.json_schemas import rewriting
from tandem.router.json_schemas.exclusive_bounds import with_moved_bounds
from tandem.router.json_schemas.rewriting import Rewriting, TooManyStepsError
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import schema_grammar

NAMES = ("a", "b", "c")
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, 2, 1.5, "", "a", "ab", "b")
TYPES = ("null", "boolean", "object", "array", "number", "string")


def is_valid(schema: Any, value: Any) -> bool:
    judge = Draft7Validator if "dependencies" in json.dumps(schema) else Draft202012Validator
    return bool(judge(schema).is_valid(value))


def taken(schema: Any, values: list[Any]) -> list[bool]:
    """Values that the grammar of a schema takes; raises InvalidGrammarError."""
    grammar = asyncio.run(check_grammar(schema_grammar(schema, "p")))
    spelling = Spelling(grammar.text, schema)
    return [spelling.takes(value) for value in values]


OBJECTS: list[Any] = [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": "a"}, {"a": "a"}, {"a": 1, "b": 1, "c": 1}, {"c": None}]
CASES: list[tuple[Any, list[Any]]] = [
    ({"not": {"type": ["string", "array"]}}, [1, None, {}, "a", []]),
    ({"not": {"enum": [1, "a", True, None]}}, [1, 2, "a", "", "ab", True, False, None, {}]),
    ({"type": "string", "not": {"enum": ["up", "upper", "é\n", "]"]}}, ["up", "upp", "upper", "é\n", "é", "]", ""]),
    ({"type": "number", "not": {"enum": [1, 2.5]}}, [0, 1, 2, 2.5, 3]),
    ({"not": {"const": [1, "a"]}}, [[], [1], [1, "a"], [1, "b"], [1, "a", 2], [2, "a"], "a"]),
    ({"not": {"const": {}}}, [{}, {"a": 1}, 1]),
    ({"type": "object", "not": {"required": ["a", "b"]}}, OBJECTS),
    ({"type": "object", "not": {"required": ["a"], "properties": {"a": {"type": "string"}}}}, OBJECTS),
    ({"not": {"anyOf": [{"type": "object", "required": ["a"]}, {"type": "string"}]}}, [*OBJECTS, "a", 1]),
    ({"not": {"not": {"type": "object", "required": ["a"]}}}, [*OBJECTS, 1]),
    ({"type": "object", "not": {"propertyNames": False}}, OBJECTS),
    ({"type": "object", "not": {"minProperties": 1}}, OBJECTS),
    ({"type": "array", "not": {"minItems": 2}}, [[], [1], [1, 2]]),
    ({"type": "array", "not": {"contains": {"type": "string"}}}, [[], [1], [1, "a"]]),
    ({"type": "string", "not": {"maxLength": 2}}, ["", "ab", "abc"]),
    ({"type": "number", "not": {"minimum": 3}}, [2, 3, 4]),
    ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, OBJECTS),
    ({"oneOf": [{"type": "string"}, {"required": ["a"]}]}, ["a", 1, {}, {"a": 1}]),
    ({"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"],
      "oneOf": [{"properties": {"k": {"const": "x"}, "v": {"type": "integer"}}},
                {"properties": {"k": {"enum": ["y", "z"]}, "v": {"type": "string"}}}]},
     [{"k": "x", "v": 1}, {"k": "x", "v": "a"}, {"k": "y", "v": "a"}, {"k": "y", "v": 1}, {"k": "q"}, {"k": "z"}]),
    ({"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
      "$defs": {"x": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"k": {"const": 1}}}]},
                "y": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"k": {"const": 2}}}]},
                "base": {"type": "object", "properties": {"k": {}}, "required": ["k"]}}},
     [{"k": 1}, {"k": 2}, {"k": 3}, {}]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, OBJECTS),
    ({"type": "object", "dependencies": {"a": ["b"], "b": {"required": ["c"]}}}, OBJECTS),
    ({"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}}, OBJECTS),
    ({"type": "object", "properties": {"a": {"type": ["integer", "string"]}, "b": {}}, "required": ["a"],
      "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]},
      "else": {"properties": {"b": {"type": "null"}}}},
     [*OBJECTS, {"a": 2}, {"a": "a", "b": None}, {"a": 1, "b": 3}, {"a": 2, "b": 3}]),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, OBJECTS),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, OBJECTS),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 2}, OBJECTS),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 1,
      "maxProperties": 2}, OBJECTS),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "propertyNames": {"pattern": "^[ac]"}}, OBJECTS),
    ({"enum": [1, 2, {"a": 1}, {"b": 1}], "not": {"anyOf": [{"const": 2}, {"patternProperties": {"^b": False}}]}},
     [1, 2, {"a": 1}, {"b": 1}]),
    ({"allOf": [{"enum": [{"a": 1, "b": 2}]}, {"not": {"additionalProperties": False, "properties": {"a": {}}}}]},
     [{"a": 1, "b": 2}, {"a": 1}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "values"), CASES)
def test_what_fits_the_result_is_what_fits_the_schema(schema: Any, values: list[Any]) -> None:
    fits = [is_valid(schema, value) for value in values]
    assert taken(schema, values) == fits
    assert len(set(fits)) == 2  # both are tried


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("byte", ["", "YQ==", "YWI=", "YWJj", "a+/9"], ["Y", "YQ=", "Y Q=", "YQ==="]),
        ("url", ["http://a.example", "https://a-b.example:80/c%20d?e=f/g?#h", "ftp://127.0.0.1/"],
         ["a.example", "http://", "http://-a.b", "mailto:a@b", "http://a b"]),
        ("uri-reference", ["", "/a", "a/b.json", "#/c", "?q=1", "//a.example/b", "https://a.example/b#c", "a:b"],
         ["a b", "%zz", "\\", "http://[", "#a#b"]),
        ("uri-template", ["", "/a/{b}", "{+path}/x{?q,r*}{#f:3}", "file:///a%20"], ["{", "{a b}", "}", "{a:0}", "a b"]),
        ("semver", ["1.0.0", "0.10.2-alpha.1+build.5", "1.2.3--"], ["1.0", "01.0.0", "1.0.0-", "1.0.0-01"]),
        ("json-pointer", ["", "/a~1b/0", "/"], ["a", "/~2"]),
    ],
)  # fmt: skip
def test_formats_of_regular_languages_are_patterns(name: str, good: list[str], bad: list[str]) -> None:
    schema = {"type": "string", "format": name}
    assert taken(schema, [*good, *bad]) == [True] * len(good) + [False] * len(bad)


def test_a_format_beside_a_pattern_stays_refused() -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        taken({"properties": {"a": {"type": "string", "format": "byte", "pattern": "a"}}}, [])
    assert caught.value.param == "p.properties.a.format"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"pattern": "a"}}, "p.not"),
        ({"not": {"type": "integer"}}, "p.not"),
        ({"properties": {"a": {"not": {"const": "b"}}, "c": {"items": {"not": {"items": {"type": "null"}}}}}},
         "p.properties.c.items.not"),
        ({"properties": {"a": {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}}},
         "p.properties.a.oneOf"),
        ({"properties": {"a": {"if": {"multipleOf": 2}, "then": {"minimum": 3}}}}, "p.properties.a.if"),
        ({"type": "object", "dependencies": {str(number): ["a"] for number in range(9)}}, "p.dependencies"),
        ({"propertyNames": {"maxLength": 3}}, "p.propertyNames"),
        ({"allOf": [{"not": {"const": 1}}, {"type": "string", "not": {"pattern": "a"}}]}, "p.allOf[1].not"),
        ({"not": {}}, "p"),
        ({"enum": [1, "a"], "not": {"type": ["number", "string"]}}, "p"),
    ],
)  # fmt: skip
def test_what_is_not_rewritten_is_refused_by_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        taken(schema, [])
    assert caught.value.param == place


def test_the_steps_of_rewriting_have_a_bound() -> None:
    deep: Any = {"type": "object", "required": ["a"]}
    for _ in range(12):
        deep = {"if": deep, "then": {"not": deep}, "else": {"oneOf": [deep, {"type": "null"}]}}
    with pytest.raises(TooManyStepsError) as caught:
        Rewriting({"properties": {"x": {"items": deep}}}).result()
    assert str(caught.value).startswith(".properties.x.items.")


def test_a_schema_of_nothing_to_rewrite_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "if": {"enum": [1]}}, "required": ["not"]}
    made = Rewriting(schema)
    assert made.result() == schema
    assert made.kept == []


def some_value(random: Random, depth: int) -> Any:
    kind = random.random()
    if depth and kind < 0.3:
        return {name: some_value(random, depth - 1) for name in random.sample(NAMES, random.randint(0, 3))}
    if depth and kind < 0.4:
        return [some_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    return random.choice(SCALARS)


def some_schema(random: Random, depth: int) -> Any:
    """A schema of keywords that are rewritten and of those that are not."""
    schema: dict[str, Any] = {}
    if random.random() < 0.6:
        schema["type"] = random.choice(("object", "object", "string", "number", "integer", random.sample(TYPES, 3)))
    for _ in range(random.randint(0 if schema else 1, 2)):
        inner = [some_schema(random, depth - 1) if depth else {"type": random.choice(TYPES)} for _ in range(2)]
        schema |= random.choice((
            {"not": inner[0]}, {"oneOf": inner}, {"anyOf": inner}, {"allOf": inner},
            {"if": inner[0], "then": inner[1]}, {"if": inner[0], "else": inner[1]},
            {"properties": {"a": inner[0], "b": inner[1]}}, {"properties": {"a": inner[0]}, "required": ["a"]},
            {"required": random.sample(NAMES, 2)}, {"dependentRequired": {"a": ["b"]}},
            {"dependentSchemas": {"a": inner[0], "b": inner[1]}}, {"enum": [some_value(random, 1) for _ in range(3)]},
            {"const": some_value(random, 1)}, {"minLength": 1, "maxLength": 1}, {"minimum": 1}, {"maximum": 1},
            {"minProperties": random.randint(0, 2)}, {"maxProperties": random.randint(1, 3)},
            {"prefixItems": inner, "minItems": 1}, {"contains": inner[0]}, {"items": inner[0]},
            {"additionalProperties": inner[0]}, {"additionalProperties": False, "properties": {"a": inner[1]}},
        ))  # fmt: skip
    return schema


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_any_accepted_schema_takes_what_fits_it(number: int) -> None:
    random = Random(number)
    schema = some_schema(random, 2)
    values = [some_value(random, 2) for _ in range(12)]
    try:
        found = taken(schema, values)
    except InvalidGrammarError:
        return
    rewritten = Rewriting(schema)
    rewritten.result()
    for value, is_taken in zip(values, found, strict=True):
        fits = is_valid(schema, value)
        assert fits or not is_taken, (schema, value)
        if not rewritten.is_narrower:
            assert is_taken is fits, (schema, value)


BETWEEN = [(0, 0.5), (1, 1.5), (2, 2.5), (10, 10.25), (-1.5, -1), (-0.5, 0), (-2.25, -2), (1, 2), (0.5, 1), (1.5, 2)]


@pytest.mark.parametrize(("low", "high"), BETWEEN)
def test_exclusive_bounds_are_not_allowed(low: float, high: float) -> None:
    """llguidance allows whole ones, however the bounds meet."""
    least, most, middle = {"exclusiveMinimum": low}, {"exclusiveMaximum": high}, (low + high) / 2
    for schema in (
        {"type": "number", **least, **most}, {"type": ["number", "null"], "allOf": [least, most]},
        {"type": "number", **least, "allOf": [{"$ref": "#/$defs/most"}], "$defs": {"most": most}},
        {"type": "number", **least, "maximum": middle}, {"type": "number", "minimum": middle, **most},
    ):  # fmt: skip
        assert taken(schema, [low, high, middle]) == [False, False, True], schema


def test_other_bounds_stay() -> None:
    for schema in ({"type": "number", "exclusiveMinimum": 0}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 9}):
        assert with_moved_bounds(schema) is schema
    assert with_moved_bounds({"exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}) == {
        "minimum": 0.25,
        "maximum": 0.5,
    }


def test_bounds_are_counts() -> None:
    assert (rewriting.MAX_STEPS, rewriting.MAX_BRANCHES, rewriting.MAX_DEPENDENCIES) == (5000, 32, 8)
