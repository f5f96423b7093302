"""Popularity of prefixes: recent prompts that begin with the same blocks, to price a copy of these blocks for later
ones.

Counted by the deepest block of a prompt that any worker holds: a system prompt has one of many requests, a conversation
goes on from another one with every turn and is never popular. Bounded; no I/O, one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from tandem.core.clock import Clock

LASTING_S: Final = 60.0
"""For so long a copy is taken to be of use: about as long as a busy worker's cache keeps unrequested blocks."""
MAX_PREFIXES: Final = 16_384
"""Counted at once: about 4 MB."""


class Popularity:
    """A count for each prefix that fades with LASTING_S. At a steady rate it is the number of prompts in that time, so
    it estimates how many more to expect. Past `max_prefixes` the one that was asked for least recently goes first."""

    def __init__(self, clock: Clock, *, max_prefixes: int = MAX_PREFIXES) -> None:
        self._clock, self._max_prefixes = clock, max_prefixes
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def followers(self, prefix: bytes) -> float:
        """Prompts with this prefix that are to be expected in LASTING_S; 0 if it is unknown, or b""."""
        count, since_s = self._counts.get(prefix, (0.0, 0.0))
        return count * math.exp(min(0.0, since_s - self._clock.now_s()) / LASTING_S) if count else 0.0

    def count(self, prefix: bytes) -> None:
        """A prompt with this prefix was sent off; b"" = no worker holds any of it."""
        if not prefix:
            return
        self._counts[prefix] = (self.followers(prefix) + 1.0, self._clock.now_s())
        self._counts.move_to_end(prefix)
        if len(self._counts) > self._max_prefixes:
            self._counts.popitem(last=False)
