"""The order in which prompts wait to be computed, and what a new one would find ahead of it. Pure, without a clock:
engines order their queue with it, routers predict with it, simulations do both.

due = min(arrived + min(stretch × remaining, max_overtake), deadline)        the first one due is computed first

`remaining` is the time that computing the rest of the prompt takes, so that short work overtakes long work. Ageing
bounds this: a prompt that arrives `max_overtake_s` later is due later. What can no longer be computed before its
deadline is due last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.core.errors import ConfigError

ASSUMED_TOKENS_PER_S = 5000.0
"""The prefill rate of a worker that has not computed a prompt yet."""
MAX_ROWS = 32
"""Rows of a queue in a load report; beyond, neighbours are merged."""


class QueuedWork(NamedTuple):
    """Prompts that wait or are being computed: when they are due, and how much is left of them.

    `attended`: pairs of a token that is left and one before it (see `attended`).
    """

    due_s: float
    tokens: int
    requests: int = 1
    attended: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpeed:
    """How fast a worker computes prompts; 0 of `tokens_per_s` = not measured.

    `tokens_per_s` is for tokens with nothing before them, `context_s` the additional time of each token for each one
    before it: most of the time of a long prompt's last tokens.
    """

    tokens_per_s: float = 0.0
    context_s: float = 0.0

    def seconds(self, tokens: float, attended: float) -> float:
        """Seconds to compute so much; as at ASSUMED_TOKENS_PER_S where it is not measured."""
        return tokens / (self.tokens_per_s or ASSUMED_TOKENS_PER_S) + self.context_s * attended


UNMEASURED = PrefillSpeed()


def attended(start: int, end: int) -> float:
    """Pairs of a token in [start, end) and a token before it: the amount of attention."""
    return (end - start) * (end + start) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Shortest remaining work first, with ageing and deadlines; `stretch` 0 = first come, first served.

    `stretch`: how many times its own computing time a prompt may be put off for shorter ones. `max_overtake_s`: no
    prompt that arrives so much later comes first.
    """

    stretch: float = 10.0
    max_overtake_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("stretch", "max_overtake_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"queue_{name} is {getattr(self, name)}", why="it must be 0 or more")

    def due_s(self, *, arrived_s: float, remaining_s: float, now_s: float, deadline_s: float = math.inf) -> float:
        """When the prompt is due, on the clock of `arrived_s`; it never falls as `remaining_s` grows."""
        if not self.stretch:
            return arrived_s
        if now_s + remaining_s > deadline_s:
            return math.inf
        return min(arrived_s + min(self.stretch * remaining_s, self.max_overtake_s), deadline_s)


FIRST_COME = QueueRules(stretch=0.0, max_overtake_s=0.0)


def condensed(queue: Iterable[QueuedWork], limit: int = MAX_ROWS) -> list[QueuedWork]:
    """Merge rows, sorted by due time, into at most `limit`: neighbours become one that is due when the first of them
    is."""
    rows = sorted(queue)
    size = -(-len(rows) // limit)
    return rows if size <= 1 else [_together(rows[at : at + size]) for at in range(0, len(rows), size)]


def _together(rows: Sequence[QueuedWork]) -> QueuedWork:
    requests, pairs = sum(row.requests for row in rows), sum(row.attended for row in rows)
    return QueuedWork(rows[0].due_s, sum(row.tokens for row in rows), requests, pairs)
