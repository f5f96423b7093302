"""Token ids to text as they arrive, per choice: whole characters only, and nothing past a stop string.

The text handed out is always a prefix of what decoding all tokens at once would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""ids → text, special tokens skipped; bytes that are no UTF-8 (yet) decode to U+FFFD."""

_BROKEN = "\ufffd"
_WINDOW = 8
"""Every token decodes the window again, so it is short."""


class IncrementalDetokenizer:
    """Decodes a growing window of recent tokens; a character whose last byte is still to come is held back.

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
            # Only the last replacement can still become a character: those before it are wrong for good.
            return self._give(text[:-1])
        delta = self._give(text)
        if len(self._window) > _WINDOW:
            self._slide()
        self._boundary = len(self._window)
        return delta

    def finish(self) -> str:
        """What was held back: nothing can complete it any more."""
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


class StopMatcher:
    """Cuts text before the first stop string, or behind it; text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._is_included = is_included
        self._held = ""
        self._free = 0
        """Characters at the beginning of the held text in which a stop string may not end."""
        self.is_stopped = False

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show; empty for good once stopped.

        A stop string does not count if it ends in a text that `may_stop` not, as of the first `min_tokens` tokens.
        """
        if not self._stops:
            return text
        if self.is_stopped:
            return ""
        text = self._held + text
        free = self._free if may_stop else len(text)
        found = [(at, at + len(stop)) for stop in self._stops if (at := self._find(text, stop, free)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            start, end = min(found)
            return text[:end] if self._is_included else text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        self._free = max(0, free - (len(text) - keep))
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        text, self._held = self._held, ""
        return "" if self.is_stopped else text

    @staticmethod
    def _find(text: str, stop: str, free: int) -> int:
        """Where `stop` first stands in `text` so that it ends beyond its first `free` characters; -1 = nowhere."""
        return text.find(stop, max(0, free - len(stop) + 1))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
