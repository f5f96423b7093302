"""Custom tools, whose input is a text: models see functions with one text, and write a JSON object around it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

from tandem.router.output_formats.events import CallArguments, CallInput, CallStart, Event

INPUT = "input"
_HEAD = ("{", json.dumps(INPUT), ":", '"')
"""The tokens before the text, blanks aside."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_CODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_LOW = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_REPLACEMENT = "\ufffd"
"""In place of half a surrogate pair, which no text of UTF-8 has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGrammar:
    """The grammar that the input of a custom tool follows; `param`: its place in the request."""

    syntax: Literal["lark", "regex"]
    definition: str
    param: str

    @property
    def lark(self) -> str:
        """The grammar in Lark."""
        if self.syntax == "lark":
            return self.definition
        document = json.loads(LLMatcher.grammar_from_regex(self.definition))
        return str(document["grammars"][0]["lark_grammar"])


Customs = Mapping[str, InputGrammar | None]
"""The custom tools of a request by name; None = the input is any text."""


def parameters_of(grammar: InputGrammar | None) -> dict[str, Any]:
    """The parameters of the function that stands for a custom tool."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None and grammar.syntax == "regex":
        text["pattern"] = f"^(?:{grammar.definition})$"
    elif grammar is not None:
        text["description"] = f"A text of this Lark grammar:\n{grammar.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def arguments_with(text: str) -> str:
    """The arguments of a call of that function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputUnwrapper:
    """Takes the inputs of custom tools out of the arguments of their calls, as they come."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._reader: _InputReader | None = None

    def unwrapped(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same events, calls of custom tools with their inputs in place of arguments."""
        for event in events:
            if isinstance(event, CallStart):
                self._reader = _InputReader() if event.name in self._names else None
                yield CallStart(event.index, event.id, event.name, is_custom=self._reader is not None)
            elif isinstance(event, CallArguments) and self._reader is not None:
                text = self._reader.add(event.text)
                if text:
                    yield CallInput(event.index, text)
            else:
                yield event


class _InputReader:
    """Reads the text of `{"input": "…"}` wherever that is cut. Arguments that begin in another way are the input
    themselves; what stands behind the text counts for nothing."""

    def __init__(self) -> None:
        self._awaited = list(_HEAD)
        self._head = self._rest = ""
        """All before the text, and what of it is not read yet."""
        self._is_raw = self._is_over = False

    def add(self, arguments: str) -> str:
        """More of the input, if it is certain."""
        if self._is_raw:
            return arguments
        self._rest += arguments
        if self._awaited and not self._has_begun(arguments):
            return self._head if self._is_raw else ""
        return "".join(self._text())

    def _has_begun(self, arguments: str) -> bool:
        """Read all before the text; False = it has not come, or something else has."""
        self._head += arguments
        while self._awaited:
            self._rest = self._rest.lstrip()
            token = self._awaited[0]
            if not self._rest.startswith(token):
                self._is_raw = not token.startswith(self._rest)
                return False
            self._rest = self._rest[len(token) :]
            self._awaited.pop(0)
        return True

    def _text(self) -> Iterator[str]:
        """The text that has come; the beginning of an escape is held back."""
        text, at = self._rest, 0
        while at < len(text) and not self._is_over:
            if plain := _PLAIN.match(text, at):
                yield plain[0]
                at = plain.end()
            elif text[at] == '"':
                self._is_over = True
            else:
                char, length = _escaped(text[at : at + 12])
                if not length:
                    break
                yield char
                at += length
        self._rest = "" if self._is_over else text[at:]


def _escaped(text: str) -> tuple[str, int]:
    """The character of the escape that `text` begins with, and its length; 0 = more is needed. What is no escape is as
    it is written."""
    if len(text) < 2:
        return "", 0
    if text[1] != "u":
        return (_ESCAPES.get(text[1]) or (text[1] if text[1] in '"\\/' else text[:2])), 2
    found = _CODE.match(text)
    if found is None:
        is_beginning = len(text) < 6 and re.fullmatch(r"\\u[0-9a-fA-F]*", text) is not None
        return ("", 0) if is_beginning else (text[:2], 2)
    code = int(found[1], 16)
    if not 0xD800 <= code < 0xE000:
        return chr(code), 6
    if code >= 0xDC00:
        return _REPLACEMENT, 6
    low = _LOW.match(text, 6)
    if low is not None:
        return chr(0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00), 12
    return ("", 0) if _may_be_low(text[6:]) else (_REPLACEMENT, 6)


def _may_be_low(text: str) -> bool:
    """True if a text of at most 6 characters, which is no low surrogate, may become one."""
    return len(text) < 6 and re.fullmatch(r"\\?|\\u([dD]([c-fC-F][0-9a-fA-F]{0,2})?)?", text) is not None
