"""Test the parsers of all formats: whole, cut anywhere, broken off, and with text that is no call."""

import json
import random
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.output_formats.parser import OutputParser
from tests.unit.router.output_formats.answers import (
    AT_THE_BEGINNING,
    FORMATS,
    TEXT,
    VALUES,
    WEATHER,
    Parsed,
    cut,
    marked,
    parse,
    spec_of,
    written,
)

CALLS: list[tuple[str, Any]] = [("get_weather", WEATHER), ("now", {}), ("get_weather", {"city": ""})]
TOKENS = pytest.mark.parametrize("tags_are_tokens", [False, True], ids=["text", "tokens"])
EACH = pytest.mark.parametrize("form", FORMATS)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT, "days": st.integers(-99, 99), "tags": st.lists(TEXT, max_size=3),
        "where": st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=5), VALUES, max_size=3),
        "is_metric": st.booleans(),
    },
)  # fmt: skip
ANSWERS = st.lists(st.tuples(st.just("get_weather"), ARGUMENTS) | st.just(("now", {})), min_size=1, max_size=3)


@EACH
@TOKENS
def test_calls_come_out_as_they_were_meant(form: str, tags_are_tokens: bool) -> None:
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    parsed = parse(spec, [marked(written(form, CALLS), spec)])
    assert (parsed.values, parsed.content, parsed.reasoning) == (CALLS, "", "")
    assert len(set(parsed.ids)) == len(CALLS)


@EACH
@TOKENS
def test_content_before_calls_is_kept_without_the_blanks_between(form: str, tags_are_tokens: bool) -> None:
    if form in AT_THE_BEGINNING:
        return
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    text = "Let me  see. \n" + written(form, CALLS)
    parsed = parse(spec, [marked(text, spec)])
    assert (parsed.values, parsed.content) == (CALLS, "Let me  see.")


@EACH
@TOKENS
def test_a_cut_at_any_position_changes_nothing(form: str, tags_are_tokens: bool) -> None:
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    text = marked(written(form, CALLS), spec)
    whole = parse(spec, [text]).without_ids()
    for at in range(len(text) + 1):
        assert parse(spec, [text[:at], text[at:]]).without_ids() == whole, text[:at]


@EACH
@given(calls=ANSWERS, before=TEXT, after=TEXT, seed=st.integers(0, 2**32), tags_are_tokens=st.booleans())
def test_any_pieces_give_what_the_whole_gives(
    form: str, calls: list[tuple[str, Any]], before: str, after: str, seed: int, tags_are_tokens: bool
) -> None:
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    before = "" if form in AT_THE_BEGINNING else before
    text = marked(before + written(form, calls) + after, spec)
    whole = parse(spec, [text])
    assert parse(spec, cut(text, random.Random(seed))).without_ids() == whole.without_ids()
    assert parse(spec, list(text)).without_ids() == whole.without_ids()
    assert whole.values == calls


@EACH
@TOKENS
def test_an_answer_that_ends_anywhere_loses_no_text(form: str, tags_are_tokens: bool) -> None:
    """Every letter of a value that was written is in the content or in the arguments."""
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    text = marked(written(form, [("get_weather", {"city": "Zanzibar", "where": {"name": "Quito"}})]), spec)
    for at in range(len(text) + 1):
        parsed = parse(spec, list(text[:at]))
        shown = parsed.content + "".join(arguments for _, arguments in parsed.calls)
        for word in ("Zanzibar", "Quito"):
            begun = [word[:count] for count in range(1, len(word) + 1) if word[:count] in text[:at]]
            assert all(part in shown for part in begun), (text[:at], shown)


@EACH
@TOKENS
@given(data=st.data())
def test_garbage_raises_nothing_and_stays(form: str, tags_are_tokens: bool, data: st.DataObject) -> None:
    """Pieces of the format in any order, with text between."""
    spec = spec_of(form, tags_are_tokens=tags_are_tokens)
    text = marked(written(form, CALLS[:1]), spec)
    parts = st.tuples(st.integers(0, len(text)), st.integers(0, 30)).map(lambda one: text[one[0] : one[0] + one[1]])
    garbage = "".join(data.draw(st.lists(parts | TEXT, max_size=8)))
    whole = parse(spec, [garbage])
    assert parse(spec, list(garbage)).without_ids() == whole.without_ids()
    json.dumps(whole.without_ids(), ensure_ascii=False).encode()  # no mark is left


@EACH
def test_a_trigger_alone_is_content(form: str) -> None:
    for tags_are_tokens in (False, True):
        spec = spec_of(form, tags_are_tokens=tags_are_tokens)
        assert spec.tools is not None
        for trigger in spec.tools.triggers:
            parsed = parse(spec, list(marked(f"{trigger} is a tag", spec)))
            assert (parsed.content, parsed.calls) == (f"{trigger} is a tag", [])


@EACH
def test_where_tags_are_tokens_text_that_looks_like_a_call_is_none(form: str) -> None:
    if form in AT_THE_BEGINNING or form == "qwen3_coder":  # their calls begin with plain text
        return
    spec, text = spec_of(form, tags_are_tokens=True), written(form, CALLS)
    assert parse(spec, list(text)) == Parsed(content=text)


def test_json_is_a_call_of_llama_only_with_the_name_of_a_tool() -> None:
    text = '{"name": "Ann", "parameters": {"a": 1}}'
    assert parse(spec_of("llama3_json"), list(text)) == Parsed(content=text)
    assert parse(spec_of("pythonic"), ["[Ann(a=1)]"]) == Parsed(content="[Ann(a=1)]")


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments":{ "a" :1}}', [("f", '{ "a" :1}')]),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', [("now", "{}")]),
        ("pythonic", "<|python_start|>[now()]<|python_end|>", [("now", "{}")]),
        ("pythonic", "[get_weather(city='a\nb')]", [("get_weather", '{"city": "a\\nb"}')]),
        ("pythonic", "[get_weather(is_metric=true, tags=[None])]",
         [("get_weather", '{"is_metric": true, "tags": [null]}')]),
        ("qwen3_coder", "<function=now>\n</function>", [("now", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12"
         "\n</parameter>\n</function>\n</tool_call>", [("get_weather", '{"city": "12", "days": 12}')]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n</function>",
         [("get_weather", '{"days": "many"}')]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=note>\n12\n</parameter>\n</function>",
         [("get_weather", '{"note": "12"}')]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=note>\nnull\n</parameter>\n</function>",
         [("get_weather", '{"note": null}')]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=is_metric>\nTrue\n</parameter>\n<parameter=note>\nNone"
         "\n</parameter>\n<parameter=where>\n{'name': 'x'}\n</parameter>\n<parameter=city>\nTrue\n</parameter>\n"
         "</function>",
         [("get_weather", '{"is_metric": true, "note": null, "where": {"name": "x"}, "city": "True"}')]),
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\nTrue\n</parameter>\n<parameter=tags>\n['a'"
         "\n</parameter>\n<parameter=note>\n(1, 2)\n</parameter>\n</function>",
         [("get_weather", '{"days": "True", "tags": "[\'a\'", "note": "(1, 2)"}')]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}')]),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("f", "{}")]),
        ("harmony", "<|channel|>analysis to=functions.f<|message|><|call|>", [("f", "{}")]),
        ("function_gemma", "<start_function_call>call:f{a:<escape>x<escape>,b:red}<end_function_call>",
         [("f", '{"a": "x", "b": "red"}')]),
        ("function_gemma", "<start_function_call>call:f{a:[True,None],b:False}<end_function_call>",
         [("f", '{"a": [true, null], "b": false}')]),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_call(form: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert parse(spec_of(form), list(text)).without_ids() == ("", "", calls)


def test_the_id_that_a_model_writes_is_kept() -> None:
    parsed = parse(spec_of("mistral"), ['[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}'])
    assert parsed.ids == ["123456789"]


@EACH
def test_a_loop_of_blanks_is_read_alike_in_any_pieces(form: str) -> None:
    spec, blanks = spec_of(form), " " * 1000
    for text in (f"Well{blanks}{written(form, CALLS)}", f"{blanks}x{blanks}", written(form, CALLS[:1]) + blanks):
        whole = parse(spec, [text])
        assert parse(spec, list(text)).without_ids() == whole.without_ids()
        assert parse(spec, [text[:500], text[500:]]).without_ids() == whole.without_ids()
    assert len(parse(spec, list(f"Well{blanks}{written(form, CALLS)}")).content) >= 4 + 1000 - 256


def test_a_long_answer_costs_no_more_for_each_token() -> None:
    """Text that is kept of an answer which goes on in one part has a bound."""
    parser = OutputParser(spec_of("hermes", "think"))
    for _ in range(2000):
        parser.add("word \n ")
    assert len(parser._reader._text) + len(parser._reader.kept) + len(parser._output._blanks) < 600


@EACH
def test_without_parallel_calls_the_first_one_counts(form: str) -> None:
    parsed = parse(spec_of(form, is_parallel=False), list(written(form, CALLS)))
    assert (parsed.values, parsed.content) == (CALLS[:1], "")


REASONED = {
    "think": ("<think>\nLet me see.\n</think>\n\n", "think"),
    "mistral": ("[THINK]Let me see.[/THINK]", "mistral"),
}


@pytest.mark.parametrize("reasoning", REASONED)
@TOKENS
def test_reasoning_is_split_off(reasoning: str, tags_are_tokens: bool) -> None:
    spec = spec_of(reasoning=reasoning, tags_are_tokens=tags_are_tokens)
    text = marked(REASONED[reasoning][0] + "It is  so.\n", spec)
    for at in range(len(text) + 1):
        assert parse(spec, [text[:at], text[at:]]) == Parsed(content="It is  so.\n", reasoning="Let me see.")


@TOKENS
def test_reasoning_that_the_prompt_began(tags_are_tokens: bool) -> None:
    spec = spec_of("hermes", "think", tags_are_tokens=tags_are_tokens, begins_inside=True)
    text = marked("Well.\n</think>\n\n" + written("hermes", CALLS), spec)
    for at in range(len(text) + 1):
        parsed = parse(spec, [text[:at], text[at:]])
        assert (parsed.reasoning, parsed.content, parsed.values) == ("Well.", "", CALLS)
    parsed = parse(spec, list(marked("Well.\n" + written("hermes", CALLS), spec)))  # a call ends reasoning, too
    assert (parsed.reasoning, parsed.content, parsed.values) == ("Well.", "", CALLS)
    assert parse(spec, ["Well, "]) == Parsed(reasoning="Well, ")


def test_an_empty_pair_is_no_reasoning() -> None:
    assert parse(spec_of(reasoning="think"), list("<think>\n\n</think>\n\nYes.")) == Parsed(content="Yes.")
    assert parse(spec_of(reasoning="think"), list("Yes <think>.")) == Parsed(content="Yes <think>.")


def test_harmony_reads_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"a":1}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>Done."
    )
    for tags_are_tokens in (False, True):
        spec = spec_of("harmony", "harmony", tags_are_tokens=tags_are_tokens)
        whole = marked(text, spec)
        for at in range(len(whole) + 1):
            parsed = parse(spec, [whole[:at], whole[at:]])
            assert parsed.without_ids() == ("I look.Done.", "Hm.\nSo.", [("now", '{"a":1}')])
    assert parse(spec_of(reasoning="harmony"), [text]).without_ids()[0] == 'I look.{"a":1}Done.'
