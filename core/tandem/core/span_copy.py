"""Follows one answer through texts that it may repeat, and offers how they go on.

The texts are the prediction of the client, and the prompt and the answer itself. Pure Python, without I/O: workers
draft from it, and the router counts the tokens of a prediction that came true.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from enum import Enum

GRAM = 3
"""Tokens that must agree before a copy begins, elsewhere than near the place where the last one ended."""
NEAR = 64
"""Tokens behind that place of a prediction where RESUMED of them are enough: an edit changes a few."""
RESUMED = 2
MOST_MATCHED = 16
"""Tokens that are compared at most: more say nothing new."""
INDEXED_AT_ONCE = 1024
"""Tokens of a long prompt that one call indexes, about 0.5 ms."""
_BREAK = -1
_MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
_MOST_SLOTS = 1 << 19
_FADE = 0.9


class DraftSource(Enum):
    """The text that is copied."""

    PREDICTION = "prediction"
    CONTEXT = "context"


class SpanCopy:
    """The place of one choice in the texts. Belongs to one thread.

    `add` every output token in order. `prediction` is empty without one; `prompt` is empty where prompt and answer are
    not to be copied. No offer has one of `ending`.
    """

    __slots__ = (
        "_bits", "_copies_context", "_cursor", "_ending", "_indexed", "_lost", "_own", "_slots", "_tail", "_text",
        "held", "hits", "matched", "tried",
    )  # fmt: skip

    def __init__(
        self, prediction: Sequence[int], prompt: Sequence[int] = (), ending: Collection[int] = (), room: int = 0
    ) -> None:
        """`room`: output tokens that are expected at most."""
        self._copies_context = bool(prompt)
        self._text = array("q", prediction)
        self._text.append(_BREAK)
        self._own = len(self._text)
        self._text.extend(prompt)
        self._ending = frozenset(ending)
        wanted = len(self._text) + (min(room, 4096) if prompt else 0)
        self._bits = min(2 * wanted + 1024, _MOST_SLOTS).bit_length()
        self._slots = array("i", bytes(4 << self._bits))
        self._indexed = GRAM
        self._tail = list(prompt[-MOST_MATCHED:])
        self._cursor: int | None = 0 if prediction else None
        self._lost = 0 if prediction else _BREAK
        self.matched = 0
        """Tokens before the offered ones that agree, MOST_MATCHED at most; 0 at the beginning of a prediction."""
        self.hits = 0
        """Output tokens that were the ones offered."""
        self.tried = self.held = 0.0
        """Output tokens that something was offered for, and those of them that were it; older ones count less."""

    @property
    def source(self) -> DraftSource | None:
        """The text that is copied; None = nothing is offered."""
        if self._cursor is None:
            return None
        return DraftSource.PREDICTION if self._cursor < self._own else DraftSource.CONTEXT

    def offer(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens that come next if the answer goes on as the text does."""
        cursor, text = self._cursor, self._text
        if cursor is None:
            return ()
        offered: list[int] = []
        for place in range(cursor, cursor + most):
            token = text[place] if place < len(text) else offered[place - len(text)]  # a loop goes on as it began
            if token == _BREAK or token in self._ending:
                break
            offered.append(token)
        return tuple(offered)

    def add(self, token: int) -> bool | None:
        """Follow an output token: True if it was the one offered, False if it was another, None without an offer."""
        cursor, text = self._cursor, self._text
        found = None if cursor is None else text[cursor] == token
        if found is not None:
            self.tried, self.held = self.tried * _FADE + 1, self.held * _FADE + found
        self._tail.append(token)
        del self._tail[:-MOST_MATCHED]
        if self._copies_context:
            text.append(token)
        if found and cursor is not None:
            self.hits += 1
            self.matched = min(self.matched + 1, MOST_MATCHED)
            self._cursor = cursor + 1
            if text[cursor + 1] == _BREAK:
                self._cursor, self._lost = None, _BREAK
        else:
            if cursor is not None and cursor < self._own:
                self._lost = cursor
            self._cursor = None
        self._index()
        if self._cursor is None:
            self._find()
        return found

    def _find(self) -> None:
        self.matched = 0
        for place in (self._looked_up(), self._resumed()):
            if place is not None and (matched := self._agreeing(place)) > self.matched:
                self._cursor, self.matched = place, matched

    def _looked_up(self) -> int | None:
        if len(self._tail) < GRAM:
            return None
        place = self._slots[self._slot(*self._tail[-GRAM:])]
        is_there = 0 < place < len(self._text) and self._text[place] != _BREAK
        return place if is_there and self._agreeing(place) >= GRAM else None

    def _resumed(self) -> int | None:
        """Where the prediction goes on, near the place where the answer left it."""
        if self._lost < 0 or len(self._tail) < RESUMED:
            return None
        text, tail = self._text, array("q", self._tail[-RESUMED:])
        for place in range(max(RESUMED, self._lost - RESUMED), min(self._lost + NEAR, self._own - 1)):
            if text[place - RESUMED : place] == tail:
                return place
        return None

    def _agreeing(self, place: int) -> int:
        """Latest tokens that also stand before `place`."""
        text, count = self._text, 0
        for token in reversed(self._tail):
            if count >= place or text[place - 1 - count] != token:
                break
            count += 1
        return count

    def _index(self) -> None:
        """Note where GRAM tokens are followed by what: a later place takes the slot of an earlier one."""
        text, slots = self._text, self._slots
        last = min(len(text), self._indexed + INDEXED_AT_ONCE)
        for place in range(self._indexed, last):
            slots[self._slot(text[place - 3], text[place - 2], text[place - 1])] = place
        self._indexed = max(self._indexed, last)

    def _slot(self, first: int, second: int, third: int) -> int:
        mixed = (first * _MIX[0] ^ second * _MIX[1] ^ third * _MIX[2]) & 0xFFFFFFFF
        return (mixed ^ mixed >> 15) >> (32 - self._bits) if self._bits < 32 else mixed
