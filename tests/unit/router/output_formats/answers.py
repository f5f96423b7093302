"""Answers of models in every format, and what their parsers make of them."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.router.output_formats.events import CallArguments, CallStart, Content, Event, Reasoning
from tandem.router.output_formats.parser import OutputParser, ParserSpec
from tandem.router.output_formats.registry import REASONING, TOOLS

SCHEMAS: Mapping[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "is_metric": {"type": "boolean"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
"""Two functions, one without arguments."""


@dataclass(slots=True)
class Parsed:
    """All parts of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, given, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(given)
                case CallArguments(index, text):
                    assert index == len(self.calls) - 1, "arguments belong to the call that began last"
                    name, before = self.calls[index]
                    self.calls[index] = (name, before + text)

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]

    def without_ids(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.content, self.reasoning, self.calls


def spec_of(
    tools: str | None = None, reasoning: str | None = None, *, tags_are_tokens: bool = False, **more: Any
) -> ParserSpec:
    """A parser of these formats; with `tags_are_tokens` every tag is a token of its own."""
    form = TOOLS[ToolFormatName(tools)] if tools else None
    thoughts = REASONING[ReasoningFormatName(reasoning)] if reasoning else None
    found = dict.fromkeys((*(form.tags if form else ()), *(thoughts.tags if thoughts else ())))
    tags = dict(enumerate(found, 100)) if tags_are_tokens else {}
    return ParserSpec(tools=form, reasoning=thoughts, schemas=SCHEMAS, tags=tags, **more)


def marked(text: str, spec: ParserSpec) -> str:
    """`text` with marks in place of the tags that are tokens."""
    for token, mark in spec.marks.items():
        text = text.replace(spec.tags[token], mark)
    return text


def parse(spec: ParserSpec, pieces: Sequence[str]) -> Parsed:
    parser, parsed = OutputParser(spec), Parsed()
    for piece in pieces:
        parsed.add(parser.add(piece))
    parsed.add(parser.finish())
    return parsed


def cut(text: str, random: random.Random) -> list[str]:
    """`text` in pieces of 1 to 8 characters."""
    pieces = []
    while text:
        size = random.randint(1, 8)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


WEATHER = {"city": 'New "York"\n\\ é', "days": 3, "tags": ["a", "b, ]"], "where": {"lat": -1.5, "name": "x}"}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def _coder(name: str, arguments: Mapping[str, Any]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f"<escape>{value}<escape>"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(one)}" for key, one in value.items()) + "}"
    return "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def written(form: str, calls: Sequence[tuple[str, Any]]) -> str:
    """The calls as a model of this format writes them."""
    match form:
        case "hermes":
            return "\n".join(_hermes(*call) for call in calls)
        case "smollm2":
            return f"<tool_call>{_json([{'name': name, 'arguments': given} for name, given in calls])}</tool_call>"
        case "llama3_json":
            return "; ".join(_json({"name": name, "parameters": given}) for name, given in calls)
        case "pythonic":
            given = (", ".join(f"{key}={value!r}" for key, value in arguments.items()) for _, arguments in calls)
            return "[" + ", ".join(f"{name}({one})" for (name, _), one in zip(calls, given, strict=True)) + "]"
        case "qwen3_coder":
            return "\n".join(_coder(*call) for call in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)
        case "mistral_list":
            return "[TOOL_CALLS] " + _json([{"name": name, "arguments": given} for name, given in calls])
        case "deepseek_v3":
            each = (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```<｜tool▁call▁end｜>"
                for name, given in calls
            )
            return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            each = (
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls
            )
            return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"
        case "harmony":
            return "<|start|>assistant".join(
                f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
                for name, given in calls
            )
        case "function_gemma":
            return "".join(
                f"<start_function_call>call:{name}{_gemma(given)}<end_function_call>" for name, given in calls
            )
    raise AssertionError(form)


FORMATS = [name.value for name in TOOLS]
AT_THE_BEGINNING = ("llama3_json", "pythonic")
"""Formats with calls at the beginning of an answer."""
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12).filter(
    lambda text: not any(tag in text for tag in ("<", "[", "\r"))
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
