"""Test grammars of calls with llguidance and the bundled tokenizer: what they let through, and what they do not."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema_rs
import llguidance
import llguidance.numpy
import numpy as np
import pytest

from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.router.output_formats.choice import Mode, ToolUse
from tandem.router.output_formats.grammar import MOST_CALLS, Thinking, behind_reasoning, call_grammar, calls_or_answer
from tandem.router.output_formats.parser import ParserSpec
from tandem.router.output_formats.registry import REASONING, TOOLS, ModelFormats
from tests.unit.router.output_formats.answers import Parsed, parse
from tests.unit.router.output_formats.guided_model import EACH, EOS, TOKENS, Model, model_of, text_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["C", "F"]},
        "is_daily": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"],
                  "additionalProperties": False},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
CALL = ("get_weather", {"city": "Rome", "days": 3, "unit": "F"})


def use(mode: Mode = "required", *, strict: bool = True, parallel: bool = True, allowed: Any = None) -> ToolUse:
    functions: list[dict[str, Any]] = [
        {"name": "get_weather", "parameters": SCHEMA, "strict": strict},
        {"name": "now"},
    ]
    names = allowed or tuple(one["name"] for one in functions)
    tools = [{"type": "function", "function": one} for one in functions]
    return ToolUse(tools=tools, mode=mode, allowed=names, is_parallel=parallel)


def grammar_of(form: str, model: Model, tools: ToolUse, thinking: Thinking | None = None) -> str | None:
    reasoning = REASONING[ReasoningFormatName.THINK] if thinking else None
    formats = ModelFormats(tools=TOOLS[ToolFormatName(form)], reasoning=reasoning)
    return call_grammar(formats, tools, model.tags, thinking or "over")


def forced(form: str, model: Model, **more: Any) -> str:
    grammar = grammar_of(form, model, use(**more))
    assert grammar is not None
    return grammar


def read(form: str, model: Model, ids: list[int]) -> Parsed:
    """The answer of these tokens as it is parsed."""
    schemas: Mapping[str, Any] = {"get_weather": SCHEMA, "now": {}}
    tags = {token: tag for tag, token in model.tags.items() if "think" not in tag}
    spec = ParserSpec(tools=TOOLS[ToolFormatName(form)], schemas=schemas, tags=tags)
    pieces, run = [], list[int]()
    for token in ids:
        if token in spec.marks:
            pieces += [model.hub.decode(run), spec.marks[token]]
            run = []
        else:
            run.append(token)
    return parse(spec, [*pieces, model.hub.decode(run)])


@EACH
@TOKENS
def test_calls_by_the_schema_are_let_through(form: str, tags_are_tokens: bool) -> None:
    model = model_of(form, tags_are_tokens)
    grammar = forced(form, model)
    assert model.accepts(grammar, text_of(form, CALL))
    assert model.accepts(grammar, text_of(form, ("now", {})))
    assert read(form, model, model.ids(text_of(form, CALL))).values == [CALL]
    has_many = TOOLS[ToolFormatName(form)].shape.is_parallel
    assert model.accepts(grammar, text_of(form, CALL, CALL, ("now", {}))) == has_many
    assert not model.accepts(forced(form, model, parallel=False), text_of(form, CALL, CALL))


@EACH
@TOKENS
def test_nothing_else_is_let_through(form: str, tags_are_tokens: bool) -> None:
    model = model_of(form, tags_are_tokens)
    grammar = forced(form, model)
    for text in ("", "Hello.", text_of(form, CALL) + " And so on"):
        assert not model.accepts(grammar, text)
    for call in (
        ("get_time", {}),
        ("get_weather", {"city": "Rome"}),
        ("get_weather", {"city": "Rome", "days": "three"}),
        ("get_weather", {"city": "Rome", "days": 21}),
        ("get_weather", {"city": "A town with a long name", "days": 3}),
        ("get_weather", {"city": "Rome", "days": 3, "unit": "K"}),
        ("get_weather", {"city": "Rome", "days": 3, "more": 1}),
        ("now", {"zone": 1}),
    ):
        assert not model.accepts(grammar, text_of(form, call)), call
    named = forced(form, model, mode="named", parallel=False, allowed=("now",))
    assert model.accepts(named, text_of(form, ("now", {})))
    assert not model.accepts(named, text_of(form, CALL))


@EACH
@TOKENS
def test_whatever_is_let_through_is_a_valid_call(form: str, tags_are_tokens: bool) -> None:
    """Random walks through the grammar, which prefer what ends something."""
    model = model_of(form, tags_are_tokens)
    grammar, draw = forced(form, model), random.Random(7)
    enders = {token for text in ('"', "}", "]", ")", ">", "</", "\n", "<", "\\n") for token in model.ids(text)}
    enders |= {EOS, *model.tags.values()}
    ended = 0
    for _ in range(12):
        ids = walk(model, grammar, draw, enders)
        if ids is None:
            continue
        ended += 1
        parsed = read(form, model, ids)
        assert parsed.calls, model.hub.decode(ids)
        assert parsed.content == ""
        for name, arguments in parsed.values:
            schema = {"get_weather": SCHEMA, "now": {"type": "object", "maxProperties": 0}}[name]
            jsonschema_rs.validate(schema, arguments)
    assert ended >= 4


def walk(model: Model, grammar: str, draw: random.Random, enders: set[int]) -> list[int] | None:
    """Tokens of a whole answer; None = it has no end in sight."""
    matcher = model.matcher(grammar)
    mask = np.zeros((1, (model.vocab + 31) // 32), dtype=np.int32)
    ids: list[int] = []
    while len(ids) < 400:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: model.vocab]).tolist()
        ending = [token for token in allowed if token in enders]
        token = draw.choice(ending if ending and draw.random() < 0.7 else allowed)
        if token == EOS:
            return ids
        ids.append(token)
        assert matcher.consume_token(token)
    return None


OPTIONS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        (OPTIONS, False),
        ({"type": "array", "items": OPTIONS}, False),
        ({"anyOf": [OPTIONS, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/options"}, False),
        ({**OPTIONS, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}}, True),
        ({**OPTIONS, "required": ["b"]}, True),
        ({"allOf": [OPTIONS, {"properties": {"b": {"type": "integer"}}}]}, True),
    ],
)
def test_objects_inside_have_the_properties_that_are_listed(schema: Any, is_open: bool) -> None:
    """SmolLM2 wrote further ones until the answer was cut."""
    model = model_of("hermes", False)
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"options": OPTIONS}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    grammar = grammar_of("hermes", model, replace(use(), tools=[tool], allowed=("go",)))
    assert grammar is not None
    for value, is_accepted in (({"a": 1}, "required" not in schema), ({"a": 1, "b": 2}, is_open)):
        given = [value] if schema.get("type") == "array" else value
        assert model.accepts(grammar, text_of("hermes", ("go", {"x": given}))) is is_accepted


@EACH
def test_calls_have_a_bound(form: str) -> None:
    """Models that repeat a call would go on to the end of the context."""
    model = model_of(form, False)
    grammar = forced(form, model)
    most = 1 if form == "harmony" else MOST_CALLS
    assert model.accepts(grammar, text_of(form, *[("now", {})] * most))
    assert not model.accepts(grammar, text_of(form, *[("now", {})] * (most + 1)))


@pytest.mark.parametrize("thinking", ["begun", "possible", "over"])
@TOKENS
def test_reasoning_comes_before_forced_calls(thinking: Thinking, tags_are_tokens: bool) -> None:
    model = model_of("hermes", tags_are_tokens)
    grammar = grammar_of("hermes", model, use(), thinking)
    assert grammar is not None
    call = text_of("hermes", CALL)
    assert model.accepts(grammar, call) == (thinking != "begun")
    assert model.accepts(grammar, f"Well.</think>\n\n{call}") == (thinking == "begun")
    assert model.accepts(grammar, f"<think>Well.</think>\n\n{call}") == (thinking == "possible") or not tags_are_tokens
    assert not model.accepts(grammar, f"<think>Well.</think>\n\nNo, {call}")


@EACH
@TOKENS
def test_strict_calls_follow_their_schema_in_free_text(form: str, tags_are_tokens: bool) -> None:
    model = model_of(form, tags_are_tokens)
    assert grammar_of(form, model, use("auto", strict=False)) is None
    grammar = grammar_of(form, model, use("auto"))
    wrong = text_of(form, ("get_weather", {"city": "Rome", "days": 21}))
    if form in ("llama3_json", "pythonic", "harmony"):
        assert grammar is None, "no tag in front of a call tells it from text"
        return
    assert grammar is not None
    for text in ("", "Hello.", text_of(form, CALL), f"Let me see.\n{text_of(form, CALL)}"):
        assert model.accepts(grammar, text), text
    assert not model.accepts(grammar, wrong)
    assert not model.accepts(grammar, f"Let me see.\n{wrong}")


@EACH
@TOKENS
def test_an_answer_by_a_schema_or_calls_in_place_of_it(form: str, tags_are_tokens: bool) -> None:
    model, formats = model_of(form, tags_are_tokens), ModelFormats(tools=TOOLS[ToolFormatName(form)])
    asked = {"type": "object", "properties": {"degrees": {"enum": [21]}}, "required": ["degrees"]}
    schema = json.dumps({"grammars": [{"json_schema": asked}]})
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    for is_strict in (False, True):
        tools = use("auto", strict=is_strict)
        grammar = calls_or_answer(schema, formats, tools, model.tags, "over")
        assert model.accepts(grammar, f'{final}{{"degrees": 21}}')
        for call in (CALL, ("now", {})):
            assert model.accepts(grammar, text_of(form, call)), call
        wrong = text_of(form, ("get_weather", {"city": "Rome", "days": 21}))
        for text in ("", "Hello.", f'{final}{{"degrees": 22}}', f'{text_of(form, CALL)}{{"degrees": 21}}', wrong):
            assert not model.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("form", "asked", "answers"),
    [
        ("llama3_json", {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"],
                         "additionalProperties": False}, ['{"name": "now"}', '{"name":"get_weathex"}']),
        ("llama3_json", {"type": "object"}, ["{}", '{"name": "x", "b": [1]}']),
        ("pythonic", {"type": "array", "items": {"type": ["integer", "null"]}}, ["[]", "[1, null]"]),
        ("pythonic", {"type": "array", "items": {"type": "string"}}, ['["now()"]']),
    ],
)  # fmt: skip
def test_answers_that_begin_as_calls_do_stand_beside_them(form: str, asked: Any, answers: list[str]) -> None:
    model, formats = model_of(form, False), ModelFormats(tools=TOOLS[ToolFormatName(form)])
    definitions = {"$defs": {"town": {"enum": ["Rome", "Oslo"]}}}
    parameters = {"type": "object", "properties": {"city": {"$ref": "#/$defs/town"}}, **definitions}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    tools = use("auto")
    tools = replace(tools, tools=[*tools.tools, tool], allowed=(*tools.allowed, "go"))
    grammar = calls_or_answer(json.dumps({"grammars": [{"json_schema": asked}]}), formats, tools, model.tags, "over")
    calls = (text_of(form, CALL), text_of(form, CALL, ("now", {})), text_of(form, ("go", {"city": "Oslo"})))
    for text in (*answers, *calls):
        assert model.accepts(grammar, text), text
    if asked != {"type": "object"}:
        assert not model.accepts(grammar, text_of(form, ("go", {"city": "Bern"})))


@TOKENS
def test_reasoning_comes_before_either(tags_are_tokens: bool) -> None:
    model = model_of("hermes", tags_are_tokens)
    formats = ModelFormats(tools=TOOLS[ToolFormatName.HERMES], reasoning=REASONING[ReasoningFormatName.THINK])
    grammar = calls_or_answer('start: "yes"', formats, use("auto"), model.tags, "begun")
    for rest in ("yes", text_of("hermes", CALL)):
        assert model.accepts(grammar, f"Well.</think>\n\n{rest}")
        assert not model.accepts(grammar, rest)


ANSWERS = {
    json.dumps({"grammars": [{"json_schema": {"enum": [7]}}]}): "7",
    'start: "yes" | "no"': "yes",
    llguidance.LLMatcher.grammar_from_regex("[a-c]+"): "abc",
}


@TOKENS
@pytest.mark.parametrize("grammar", ANSWERS)
def test_a_grammar_holds_behind_reasoning(grammar: str, tags_are_tokens: bool) -> None:
    model, formats = model_of("hermes", tags_are_tokens), ModelFormats(reasoning=REASONING[ReasoningFormatName.THINK])
    answer = ANSWERS[grammar]
    allowed: dict[Thinking, tuple[str, ...]] = {
        "possible": (answer, f"<think>is it {answer}?</think>\n\n{answer}"),
        "begun": (f"is it {answer}?</think>\n\n{answer}",),
        "over": (answer,),
    }
    for thinking, texts in allowed.items():
        made = behind_reasoning(grammar, formats, model.tags, thinking)
        assert all(model.accepts(made, text) for text in texts), thinking
        assert not model.accepts(made, f"{texts[-1]}!")
        assert not model.accepts(made, "well")
    assert behind_reasoning(grammar, ModelFormats(), model.tags) == grammar


@TOKENS
def test_a_grammar_holds_in_the_final_channel_of_harmony(tags_are_tokens: bool) -> None:
    formats = ModelFormats(tools=TOOLS[ToolFormatName.HARMONY], reasoning=REASONING[ReasoningFormatName.HARMONY])
    model, final = model_of("harmony", tags_are_tokens), "<|channel|>final<|message|>"
    made = behind_reasoning('start: "yes" | "no"', formats, model.tags)
    assert model.accepts(made, f"{final}yes")
    assert model.accepts(made, f"<|channel|>analysis<|message|>Hm, no.<|end|><|start|>assistant{final}yes")
    assert not model.accepts(made, "yes")
    assert not model.accepts(made, f"{final}maybe")
