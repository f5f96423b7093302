"""Values of any kind under keywords of a schema: it is rewritten or refused, and none breaks the router."""

import asyncio
import json
from typing import Any

import pytest

from tandem.core.errors import InvalidGrammarError
from tandem.router.json_schemas import combined_values
from tandem.router.json_schemas.combined_values import MAX_PAIRS, crossing_path
from tandem.router.json_schemas.keywords import RESTRICTIONS
from tandem.router.json_schemas.rewriting import Rewriting
from tandem.router.serving.grammar_check import check_grammar
from tandem.router.serving.output_grammar import schema_grammar

VALUES: tuple[Any, ...] = (
    None, True, -1, 1.5, 10**30, "(", [], [1], [{}], ["a", {}], {}, {"a": 1}, {"a": [{}]}, {"pattern": {}},
    {"required": [{}]}, {"type": [{}]},
)  # fmt: skip
BESIDE: tuple[dict[str, Any], ...] = ({}, {"type": "object"}, {"enum": [1, {"a": 1}, "a"]}, {"required": ["a"]})


def around(part: dict[str, Any]) -> list[dict[str, Any]]:
    other = {"type": "object", "required": ["a"]}
    return [
        part, {"not": part}, {"oneOf": [part, other]}, {"if": part, "then": part}, {"propertyNames": part},
        {"allOf": [part, {"enum": [1, "a"]}]}, {"dependencies": {"a": part}},
    ]  # fmt: skip


@pytest.mark.parametrize("keyword", sorted(RESTRICTIONS))
def test_any_value_of_a_keyword_is_rewritten_or_left(keyword: str) -> None:
    for value in VALUES:
        for beside in BESIDE:
            for schema in around({**beside, keyword: value}):
                assert crossing_path(schema) is None
                assert isinstance(Rewriting(schema).result(), dict | bool), schema


def test_a_complement_with_a_bound_beyond_64_bits_is_for_llguidance_to_refuse() -> None:
    schema = {"type": "integer", "not": {"maximum": 2**64 - 1}}
    with pytest.raises(InvalidGrammarError, match=r"Unsatisfiable|integer range"):
        asyncio.run(check_grammar(schema_grammar(schema, "p")))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": -(2**63)}, "p.const"),
        ({"properties": {"a": {"enum": [1, {"b": [-(2**63) + 100]}]}}}, "p.properties.a.enum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "p.maximum"),
        ({"allOf": [{"type": "integer", "maximum": -1e19}, {"minimum": -1e19}]}, "p.allOf[0].maximum"),
        ({"type": "integer", "not": {"minimum": -(2**63)}}, "p"),
    ],
)
def test_numbers_that_would_end_the_process_are_refused(schema: Any, place: str) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        asyncio.run(check_grammar(schema_grammar(schema, "p")))
    assert caught.value.param == place


def test_other_low_numbers_are_taken() -> None:
    for schema in ({"const": -(2**63) + 10**9}, {"const": 2**63 - 1}):
        checked = asyncio.run(check_grammar(schema_grammar(schema, "p")))
        assert checked.kind == "schema"


cross = combined_values._cross


def names(count: int, first: int = 0) -> list[str]:
    return [f"name {number}" for number in range(first, first + count)]


def options(*values: str) -> dict[str, Any]:
    return {"anyOf": [{"const": value, "title": value} for value in values]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"allOf": [{"enum": names(1000)}, {"enum": names(900)}]}, "p"),
        ({"properties": {"a": {"$ref": "#/$defs/a", "enum": names(400)}}, "$defs": {"a": {"enum": names(300)}}},
         "p.properties.a"),
        ({"allOf": [{"properties": {"a": {"enum": names(400)}}}, {"properties": {"a": {"enum": names(300)}}}]}, "p"),
        ({"items": {"allOf": [options(*names(200)), options(*names(200, 100))]}}, "p.items"),
    ],
)  # fmt: skip
def test_lists_of_values_that_llguidance_compares_for_seconds_are_refused(schema: Any, place: str) -> None:
    with pytest.raises(InvalidGrammarError) as caught:
        asyncio.run(check_grammar(schema_grammar(schema, "p")))
    assert f"more than {MAX_PAIRS} pairs" in str(caught.value.why)
    assert caught.value.param == place


def test_lists_of_values_of_other_places_are_not_compared() -> None:
    apart = {"allOf": [{"properties": {key: {"enum": names(400)}}} for key in "abc"]}
    assert crossing_path(apart) is None
    assert crossing_path({"anyOf": [{"enum": names(3000)}, {"enum": names(3000)}]}) is None


def test_values_of_two_short_lists_are_compared_here() -> None:
    schema = {"$ref": "#/$defs/a", "enum": names(200, 100), "$defs": {"a": {"enum": names(200)}}}
    checked = json.loads(asyncio.run(check_grammar(schema_grammar(schema, "p"))).text)
    assert checked["grammars"][0]["json_schema"]["enum"] == names(100, 100)


def test_references_in_a_chain_end_the_count() -> None:
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(3000)}
    assert crossing_path({"$ref": "#/$defs/d0", "$defs": chain}) is None


def test_definitions_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combined_values, "_MAX_VISITS", 400)
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(30)}
    crossed = {"allOf": [{"enum": names(100)}, {"enum": names(100)}]}
    assert crossing_path({"$ref": "#/$defs/d0", "$defs": {**twice, "d30": crossed}}) is not None


def test_places_that_double_end_the_count() -> None:
    """A document of 3 KB had 8 million of them, which took 28 s and 4.7 GiB."""

    def named(number: int) -> dict[str, Any]:
        return {"properties": {name: {"$ref": f"#/$defs/d{number}"} for name in "ab"}}

    chain = {f"d{number}": named(number + 1) for number in range(23)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d23": {"enum": [1, 2]}}}
    counting = combined_values._Counting(schema)
    assert 0 < len(counting._values(schema, frozenset(), 0)) <= combined_values._MAX_PLACES
    assert crossing_path(schema) is None
    crossed = {"allOf": [{"enum": names(100)}, {"enum": names(100)}]}
    assert crossing_path({"$ref": "#/$defs/d0", "$defs": {**chain, "d23": crossed}}) is not None


@pytest.mark.parametrize("key", ["allOf", "anyOf"])
def test_copies_of_places_end_the_count(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"properties": {f"p{number}": {"enum": [1]} for number in range(1000)}}
    copied: list[int] = []

    def counted(found: Any, other: Any) -> None:
        copied.append(len(other))
        cross(found, other)

    monkeypatch.setattr(combined_values, "_cross", counted)
    assert crossing_path({key: 2000 * [{"$ref": "#/$defs/wide"}], "$defs": {"wide": wide}}) is None
    assert sum(copied) < 2 * combined_values._MAX_PLACES
