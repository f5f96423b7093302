"""Token ids back to text as they arrive, per choice: whole characters only, and nothing past a stop string. The text
handed out is always a prefix of what decoding all tokens at once would give."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Decode = Callable[[Sequence[int]], str]
"""ids → text, special tokens skipped; bytes that are no UTF-8 (yet) decode to U+FFFD."""

_BROKEN = "\ufffd"
_WINDOW = 8
"""Every token decodes the window again, so it is short."""
_CHARACTER = 4
"""No character has more bytes, so none has more tokens."""
_BROKEN_WINDOW = 16
"""Bytes that are no text, one a token, are cut off here; a text of them alone would never end at a character."""


class Detokenizer(Protocol):
    """Text of one choice as it grows."""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""

    def finish(self) -> str:
        """Return the text that was held back: nothing can complete it any more."""


class ByteDetokenizer:
    """For models with bytes as tokens, whatever stands around them: text is the bytes of all tokens, one behind the
    other. `bytes_of` gives those of a token, none for a special one."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._held = b""

    def add(self, tokens: Sequence[int]) -> str:
        data = self._held + b"".join(map(self._bytes_of, tokens))
        text, read = codecs.utf_8_decode(data, "replace", False)
        self._held = data[read:]
        return text

    def finish(self) -> str:
        data, self._held = self._held, b""
        return data.decode("utf-8", "replace")


class MarkingDetokenizer:
    """Writes the character of `marks` for each token in it, the rest as `inner` does."""

    def __init__(self, inner: Detokenizer, marks: Mapping[int, str]) -> None:
        self._inner, self._marks = inner, marks

    def add(self, tokens: Sequence[int]) -> str:
        parts, start = [], 0
        for place, token in enumerate(tokens):
            if token in self._marks:
                parts += [self._inner.add(tokens[start:place]), self._inner.finish(), self._marks[token]]
                start = place + 1
        return "".join([*parts, self._inner.add(tokens[start:])])

    def finish(self) -> str:
        """Return the text that was held back: nothing can complete it any more."""
        return self._inner.finish()


class IncrementalDetokenizer:
    """Decodes a growing window of recent tokens; a character is held back until its last byte has come.

        ids:  … | context | read, text handed out | unread |
                ^ start                                      the window that is decoded is ids[start:]

    The window starts where a character started, and always holds some context before the unread tokens, because some
    decoders write the first token of a text differently (without its leading space).
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        self._boundary = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete."""
        if not tokens:
            return ""
        self._window.extend(tokens)
        text = self._decode(self._window)
        if text.endswith(_BROKEN):
            pending = _pending(text)
            delta = self._give(text[: len(text) - pending])
            if len(self._window) - self._boundary > _BROKEN_WINDOW:
                self._cut(text, pending)
            return delta
        delta = self._give(text)
        if len(self._window) > _WINDOW:
            self._slide()
        self._boundary = len(self._window)
        return delta

    def finish(self) -> str:
        """Return the text that was held back: nothing can complete it any more."""
        return self._give(self._decode(self._window)) if self._window else ""

    def _give(self, text: str) -> str:
        delta = text[self._given :]
        self._given = max(self._given, len(text))
        return delta

    def _slide(self) -> None:
        # The previous boundary is where a character ended, so the tokens behind it decode on their own.
        if 0 < self._boundary < len(self._window):
            self._window = self._window[self._boundary :]
            self._given = len(self._decode(self._window))

    def _cut(self, text: str, pending: int) -> None:
        """Forget all but the last tokens of a text that ends in bytes which are none (yet).

        What is kept has to decode as it does behind the rest. Where no place is like that, the window grows a little
        more, and is cut all the same: the last of the broken bytes may come out otherwise then.
        """
        for count in range(_CHARACTER, _BROKEN_WINDOW):
            head, tail = self._decode(self._window[:-count]), self._decode(self._window[-count:])
            if len(tail) >= pending and head + tail == text:
                break
        else:
            if len(self._window) - self._boundary <= 2 * _BROKEN_WINDOW:
                return
            tail = self._decode(self._window[-count:])
        self._window, self._boundary = self._window[-count:], 0
        self._given = max(0, len(tail) - pending)


def _pending(text: str) -> int:
    """How many replacements at the end may still become a character: decoders write one for each of its bytes, or one
    for all; the fourth byte would have completed it."""
    return min(_CHARACTER - 1, len(text) - len(text.rstrip(_BROKEN)))


class StopMatcher:
    """Cuts text before the first stop string, or behind it; text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = [_Stop(stop) for stop in stops if stop]
        self._is_included = is_included
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def is_stopped(self) -> bool:
        """True once a stop string was found."""
        return self.found is not None

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show; empty for good once stopped.

        A stop string does not count if it ends in a text that `may_stop` not, as of the first `min_tokens` tokens.
        """
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        ends = [(stop, stop.read(text)) for stop in self._stops]
        before, text = len(self._held), self._held + text
        found = [(before + end - len(stop.text), before + end, stop.text) for stop, end in ends if end and may_stop]
        if found:
            self._held = ""
            start, end, self.found = min(found)
            return text[:end] if self._is_included else text[:start]
        keep = max(stop.length for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return "" if self.is_stopped else text


class _Stop:
    """One stop string, and how much of its beginning the text read so far ends with (Knuth, Morris, Pratt 1977).

    A character costs about one comparison, however much is held back.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = 0
        self._borders = [0, 0]
        """By length of a beginning: the longest shorter one that it ends with. Known as far as it was needed."""

    def read(self, text: str) -> int:
        """Where in `text` it first ends; 0 = nowhere."""
        end, at, count = 0, 0, len(text)
        while at < count:
            if not self.length:
                at = text.find(self.text[0], at)
                if at < 0:
                    break
            self.length = self._after(self.length, text[at])
            at += 1
            if self.length == len(self.text):
                end = end or at
                self.length = self._borders[self.length]
        return end

    def _after(self, length: int, character: str) -> int:
        while length and self.text[length] != character:
            length = self._borders[length]
        if self.text[length] != character:
            return 0
        length += 1
        if length == len(self._borders):
            self._borders.append(self._after(self._borders[-1], character))
        return length
