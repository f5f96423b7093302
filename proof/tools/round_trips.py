"""Answers taken apart as the router does it: bytes and tags are tokens, which come in pieces of any size."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.router.output_formats.events import CallArguments, CallStart, Content, Event, Reasoning
from tandem.router.output_formats.parser import OutputParser, ParserSpec
from tandem.router.output_formats.reasoning import ReasoningFormat
from tandem.router.output_formats.tool_format import Schemas, ToolFormat
from tandem.router.tokenization.detokenizer import ByteDetokenizer, MarkingDetokenizer

FIRST_TAG = 256
"""The first id of a tag; those below are bytes."""
_BYTES = [bytes((byte,)) for byte in range(FIRST_TAG)]


@dataclass(slots=True)
class Parts:
    """An answer taken apart, its pieces joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, _, name):
                    assert index == len(self.calls), "calls are numbered as they come"
                    self.calls.append([name, ""])
                case CallArguments(index, text):
                    assert index == len(self.calls) - 1, "arguments belong to the call that began last"
                    self.calls[index][1] += text

    def values(self) -> list[tuple[str, Any]]:
        """The calls with their arguments as objects. ValueError for arguments that are no JSON."""
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


class Answers:
    """Answers of one format. `has_tokens`: its tags are tokens of their own."""

    def __init__(
        self, tools: ToolFormat, reasoning: ReasoningFormat | None, schemas: Schemas, *,
        has_tokens: bool, begins_inside: bool = False,
    ) -> None:  # fmt: skip
        tags = dict.fromkeys((*tools.tags, *(reasoning.tags if reasoning else ()))) if has_tokens else {}
        self._spec = ParserSpec(
            tools=tools, reasoning=reasoning, schemas=schemas, tags=dict(enumerate(tags, FIRST_TAG)),
            begins_inside=begins_inside,
        )  # fmt: skip
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(tags, key=len, reverse=True))) + ")")
        self._ids = {text: token for token, text in self._spec.tags.items()}

    def tokens(self, text: str) -> list[int]:
        """One for each byte and each tag."""
        parts = self._split.split(text) if self._ids else [text]
        return [token for part in parts for token in ((self._ids[part],) if part in self._ids else part.encode())]

    def parts(self, pieces: Iterable[Sequence[int]]) -> Parts:
        """The answer with its tokens in these pieces."""
        parser, found = OutputParser(self._spec), Parts()
        text_of = MarkingDetokenizer(ByteDetokenizer(_BYTES.__getitem__), self._spec.marks)
        for piece in pieces:
            found.add(parser.add(text_of.add(piece)))
        found.add(parser.add(text_of.finish()))
        found.add(parser.finish())
        return found

    def in_pieces(self, text: str, rng: random.Random, *, is_cut_everywhere: bool) -> Iterator[Parts]:
        """The answer in random pieces, token by token, and, if `is_cut_everywhere`, cut in two at each place."""
        tokens = self.tokens(text)
        places = sorted(rng.sample(range(len(tokens) + 1), min(len(tokens), rng.randint(1, 12))))
        yield self.parts(tokens[start:end] for start, end in zip([0, *places], [*places, len(tokens)], strict=True))
        yield self.parts([token] for token in tokens)
        for at in range(len(tokens) + 1 if is_cut_everywhere else 0):
            yield self.parts((tokens[:at], tokens[at:]))


def is_equal(calls: Sequence[tuple[str, Mapping[str, Any]]], parts: Parts) -> bool:
    """True if the answer has these calls. Numbers are equal by value, and true is not 1."""
    try:
        return _exact(parts.values()) == _exact(calls)
    except ValueError:
        return False


def _exact(calls: Sequence[tuple[str, Any]]) -> list[str]:
    return [f"{name} {json.dumps(_plain(one), sort_keys=True)}" for name, one in calls]


def _plain(value: Any) -> Any:
    """With whole fractions as integers: 3.0 is 3 in JSON."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
