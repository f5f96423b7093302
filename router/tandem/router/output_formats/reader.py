"""Reads text that is still being written: parsers are generators that pause, by `yield`, until more text has come.

Each step depends on the text alone and never on where it was cut, so an answer is parsed alike in any pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
"""A step of a parser: it pauses where it needs more text, and returns a T."""
Emit = Callable[[str], object]

FIRST_MARK = 0xDC80
LAST_MARK = 0xDCFF
"""Lone surrogates stand for tags that are tokens of their own: no text of a model contains them."""
_INSIDE_STRING = re.compile(r'[^"\\]*')
_OUTSIDE_STRING = re.compile(r'[^"{}\[\]\udc80-\udcff]*')
_SCALAR = re.compile(r'[^\s,:{}\[\]"\udc80-\udcff]*')
_BLANKS = re.compile(r"\s*")
_CLOSING = {"{": "}", "[": "]"}


class Reader:
    """The text that has come and is not read yet. `marks` are the characters that stand for tags in it."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks
        self._text, self._at = "", 0
        self.is_over = False
        self.kept = ""
        """Text that was read since somebody emptied this: shown as it is if it turns out to be no call."""

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    @property
    def rest(self) -> str:
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Read `count` characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.kept += text
        return text

    def fill(self, count: int) -> Step[bool]:
        """Wait until `count` characters are unread; False if the text ends before."""
        while len(self._text) - self._at < count:
            if self.is_over:
                return False
            yield
        return True

    def begins(self, *tags: str) -> Step[str]:
        """The first of `tags` that comes next, blanks before it aside; "" = none. Nothing is read."""
        found, _ = yield from self._next(tags)
        return found

    def skip(self, *tags: str) -> Step[str]:
        """Read the blanks and that one of `tags` that come next, and return it; "" = none, and nothing is read."""
        found, length = yield from self._next(tags)
        self.take(length)
        return found

    def _next(self, tags: Sequence[str]) -> Step[tuple[str, int]]:
        """The tag that comes next, and how many characters it and the blanks before it have."""
        texts = [(tag, self._marks.get(tag, tag)) for tag in tags]
        while True:
            start = self._blanks()
            rest = self._text[start:]
            for tag, text in texts:
                if rest.startswith(text):
                    return tag, start - self._at + len(text)
            if self.is_over or (rest and not any(text.startswith(rest) for _, text in texts)):
                return "", 0
            yield

    def _blanks(self) -> int:
        found = _BLANKS.match(self._text, self._at)
        return found.end() if found else self._at

    def until(self, tags: Sequence[str], emit: Emit) -> Step[str]:
        """Give `emit` the text before the first of `tags`, and return that tag, which is left unread; "" = the text
        ended. No tag may contain another. What may be the beginning of a tag is held back."""
        texts = {self._marks.get(tag, tag): tag for tag in tags}
        while True:
            places = [(self._text.find(text, self._at), text) for text in texts]
            found = min(((at, text) for at, text in places if at >= 0), default=None)
            if found is not None:
                emit(self.take(found[0] - self._at))
                return texts[found[1]]
            held = 0 if self.is_over else _beginning(self.rest, texts)
            if len(self._text) - self._at > held:
                emit(self.take(len(self._text) - self._at - held))
            if self.is_over:
                return ""
            yield

    def run(self, pattern: re.Pattern[str]) -> Step[str]:
        """Read the longest text of `pattern`, which matches character by character."""
        parts = []
        while True:
            found = pattern.match(self._text, self._at)
            parts.append(self.take(found.end() - self._at) if found else "")
            if self._at < len(self._text) or self.is_over:
                return "".join(parts)
            yield

    def blanks(self) -> Step[str]:
        """Read the blanks that come next."""
        return self.run(_BLANKS)

    def string(self) -> Step[str | None]:
        """Read a JSON string, blanks before it aside, and return its text; None = none, or not a whole one."""
        if not (yield from self.begins('"')):
            return None
        self.take(self._blanks() - self._at)
        parts: list[str] = []
        if not (yield from self._string(parts.append)):
            return None
        try:
            text = str(json.loads("".join(parts), strict=False))
            text.encode()
        except ValueError:  # no string, or one with a tag in it
            return None
        return text

    def json_value(self, emit: Emit) -> Step[bool]:
        """Give `emit` one JSON value as it is written; False if the text ends, or breaks off, before its end. Brackets
        and strings alone are checked."""
        yield from self.blanks()
        if not (yield from self.fill(1)):
            return False
        if self.rest[0] == '"':
            return (yield from self._string(emit))
        if self.rest[0] not in _CLOSING:
            scalar = yield from self.run(_SCALAR)
            emit(scalar)
            return bool(scalar)
        closing: list[str] = []
        while True:
            emit((yield from self.run(_OUTSIDE_STRING)))
            if not (yield from self.fill(1)):
                return False
            char = self.rest[0]
            if char == '"':
                if not (yield from self._string(emit)):
                    return False
            elif char in _CLOSING:
                closing.append(_CLOSING[char])
                emit(self.take(1))
            elif char != closing[-1]:
                return False
            else:
                emit(self.take(1))
                closing.pop()
                if not closing:
                    return True

    def _string(self, emit: Emit) -> Step[bool]:
        emit(self.take(1))
        while True:
            emit((yield from self.run(_INSIDE_STRING)))
            if not (yield from self.fill(1)):
                return False
            if self.rest[0] == '"':
                emit(self.take(1))
                return True
            is_whole = yield from self.fill(2)
            emit(self.take(2 if is_whole else 1))


def _beginning(text: str, tags: Mapping[str, str]) -> int:
    """How many characters at the end of `text` may be the beginning of a tag."""
    for count in range(min(len(text), max(map(len, tags), default=1) - 1), 0, -1):
        if any(tag.startswith(text[-count:]) for tag in tags):
            return count
    return 0
