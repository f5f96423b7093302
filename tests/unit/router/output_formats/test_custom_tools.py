"""Custom tools: inputs come out of arguments exactly, however those are cut, and follow their grammars in every
format that lets them."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import UnsupportedParameterError
from tandem.core.output_format_names import ToolFormatName
from tandem.router.output_formats.choice import Mode, ToolUse
from tandem.router.output_formats.custom_tools import (
    InputGrammar,
    InputUnwrapper,
    arguments_with,
    parameters_of,
)
from tandem.router.output_formats.events import CallArguments, CallInput, CallStart, Content, Event
from tandem.router.output_formats.grammar import call_grammar
from tandem.router.output_formats.parser import OutputParser
from tandem.router.output_formats.registry import TOOLS, ModelFormats
from tests.unit.router.output_formats.answers import FORMATS, cut, marked, spec_of, written
from tests.unit.router.output_formats.guided_model import EACH, TOKENS, Model, model_of, text_of

PLAIN = ("qwen3_coder", "function_gemma")
"""Formats that write texts without escapes."""
UNMARKED = ("llama3_json", "pythonic", "harmony")
"""Formats in which no tag tells a call from text."""


def read(pieces: Sequence[str]) -> str:
    """The input of a call with these pieces of arguments."""
    unwrapper = InputUnwrapper(["run"])
    events: list[Event] = [CallStart(0, "a", "run"), *(CallArguments(0, piece) for piece in pieces)]
    start, *inputs = unwrapper.unwrapped(events)
    assert start == CallStart(0, "a", "run", is_custom=True)
    assert all(isinstance(one, CallInput) and one.index == 0 and one.text for one in inputs)
    return "".join(one.text for one in inputs if isinstance(one, CallInput))


def at_every_cut(arguments: str) -> str:
    """The input, which is the same in two pieces cut anywhere, and character by character."""
    whole = read([arguments])
    for at in range(len(arguments) + 1):
        assert read([arguments[:at], arguments[at:]]) == whole, at
    assert read(list(arguments)) == whole
    return whole


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": ""}', ""),
        ('{"input":"a"}', "a"),
        (' { "input" : "a" , "b": {"input": "c"}}', "a"),
        (r'{"input": "\"\\\/\b\f\n\r\t"}', '"\\/\b\f\n\r\t'),
        (r'{"input": "\u00e9\u20AC\u0000"}', "é€\0"),
        (r'{"input": "\ud83d\ude00!\uD83D\uDE00"}', "😀!😀"),
        (r'{"input": "\ud83d"}', "\ufffd"),
        (r'{"input": "\ud83dx\ude00y"}', "\ufffdx\ufffdy"),
        (r'{"input": "\ud83d\ud83d\ude00"}', "\ufffd😀"),
        (r'{"input": "\ud83d\n\ud83d\u0041"}', "\ufffd\n\ufffdA"),
        (r'{"input": "\x\u12g4\u"}', r"\x\u12g4\u"),
        ('{"input": "a\nb\t"}', "a\nb\t"),
        ('{"input": "é😀"}', "é😀"),
        ('{"input": "cut', "cut"),
        (r'{"input": "cut\ud83d\ude', "cut"),
        ('{"inp', ""),
        ("{}", "{}"),
        ('{"text": "a"}', '{"text": "a"}'),
        ('{"input": 7}', '{"input": 7}'),
        ('{"b": 1, "input": "a"}', '{"b": 1, "input": "a"}'),
        ("print(1)", "print(1)"),
    ],
)
def test_an_input_is_read_alike_in_any_pieces(arguments: str, text: str) -> None:
    assert at_every_cut(arguments) == text


@given(text=st.text(st.characters(codec="utf-8")), is_ascii=st.booleans(), seed=st.integers(0, 2**32))
def test_any_text_comes_out_as_it_was(text: str, is_ascii: bool, seed: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    assert read(cut(arguments, random.Random(seed))) == text
    assert json.loads(arguments_with(text)) == {"input": text}


def test_other_calls_and_text_stay_as_they_are() -> None:
    events: list[Event] = [
        Content("a"), CallStart(0, "a", "f"), CallArguments(0, '{"input": "x"}'), CallStart(1, "b", "run"),
        CallArguments(1, '{"input": "y'), CallStart(2, "c", "run"), CallArguments(2, '{"input": "z"}'),
    ]  # fmt: skip
    assert list(InputUnwrapper(["run"]).unwrapped(events)) == [
        *events[:3], CallStart(1, "b", "run", is_custom=True), CallInput(1, "y"),
        CallStart(2, "c", "run", is_custom=True), CallInput(2, "z"),
    ]  # fmt: skip


@EACH
@TOKENS
def test_inputs_come_out_of_every_format(form: str, tags_are_tokens: bool) -> None:
    text = 'def f(): "é"\n\tpass\\'
    spec = replace(
        spec_of(form, tags_are_tokens=tags_are_tokens, customs=frozenset(["run"])),
        schemas={"run": parameters_of(None)},
    )
    answer = marked(written(form, [("run", {"input": text})]), spec)
    for pieces in ([answer], list(answer)):
        parser = OutputParser(spec)
        events = [event for piece in pieces for event in parser.add(piece)] + parser.finish()
        assert [event.name for event in events if isinstance(event, CallStart) and event.is_custom] == ["run"]
        assert "".join(event.text for event in events if isinstance(event, CallInput)) == text
        assert not any(isinstance(event, CallArguments) for event in events)


def use(grammar: InputGrammar | None, mode: Mode) -> ToolUse:
    function = {"name": "run", "parameters": parameters_of(grammar), "strict": grammar is not None}
    tools = [{"type": "function", "function": function}]
    return ToolUse(tools=tools, mode=mode, allowed=("run",), is_parallel=False, customs={"run": grammar})


def grammar_of(form: str, model: Model, given: InputGrammar | None, mode: Mode = "required") -> str | None:
    formats = ModelFormats(tools=TOOLS[ToolFormatName(form)])
    return call_grammar(formats, use(given, mode), model.tags)


def of(syntax: Any, definition: str) -> InputGrammar:
    return InputGrammar(syntax=syntax, definition=definition, param="tools[0].format")


LARK = 'start: (WORD ";" NL)+\nWORD: /[a-z]+/\nNL: "\\n"'


@EACH
@TOKENS
@pytest.mark.parametrize("definition", [r"[a-c]+/\d{2}(\n|x)", r"^[a-c]+/\d{2}(\n|x)$"])
def test_a_regex_holds_in_every_format(form: str, tags_are_tokens: bool, definition: str) -> None:
    model = model_of(form, tags_are_tokens)
    grammar = grammar_of(form, model, of("regex", definition))
    assert grammar is not None
    for text, is_right in (("ab/12x", True), ("c/00\n", True), ("ab/1x", False), ("ab/12xx", False), ("", False)):
        assert model.accepts(grammar, text_of(form, ("run", {"input": text}))) == is_right, text


@pytest.mark.parametrize("form", PLAIN)
@TOKENS
def test_a_lark_grammar_holds_where_texts_have_no_escapes(form: str, tags_are_tokens: bool) -> None:
    model = model_of(form, tags_are_tokens)
    grammar = grammar_of(form, model, of("lark", LARK))
    assert grammar is not None
    for text, is_right in (("ab;\n", True), ("a;\nb;\n", True), ("ab\n", False), ("A;\n", False)):
        assert model.accepts(grammar, text_of(form, ("run", {"input": text}))) == is_right, text


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in PLAIN])
def test_a_lark_grammar_is_refused_where_texts_have_escapes(form: str) -> None:
    with pytest.raises(UnsupportedParameterError, match="cannot be enforced") as caught:
        grammar_of(form, model_of(form, False), of("lark", LARK))
    assert caught.value.param == "tools[0].format.syntax"


@EACH
def test_a_grammar_holds_in_free_text_or_is_refused(form: str) -> None:
    model, given = model_of(form, True), of("regex", "[0-9]+")
    assert grammar_of(form, model, None, "auto") is None
    if form in UNMARKED:
        with pytest.raises(UnsupportedParameterError, match="no tag tells") as caught:
            grammar_of(form, model, given, "auto")
        assert caught.value.param == "tools[0].format"
        return
    grammar = grammar_of(form, model, given, "auto")
    assert grammar is not None
    assert model.accepts(grammar, "Just text.")
    assert model.accepts(grammar, "So: " + text_of(form, ("run", {"input": "12"})))
    assert not model.accepts(grammar, "So: " + text_of(form, ("run", {"input": "a"})))
