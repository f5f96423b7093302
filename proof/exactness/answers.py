"""Compares answers to prompts with transformers: in fp32 by numbers, in bfloat16 by the best tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from proof.exactness.compare import CLEAR_GAP, TOLERANCE, largest

NEAR = 5
"""In bfloat16 either's token must be among so many of the other's best where they first differ."""
ENOUGH = {"float32": 0.8, "bfloat16": 0.25}
"""Least part of the tokens that must have been compared, by dtype: less proves nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`chosen` tokens, each with (token, log-probability) of the best ones; row i was computed behind `text[:i]`."""

    prompt: list[int]
    text: list[int]
    chosen: list[int]
    best: list[list[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class PathVerdict:
    """Result of a path. `max_error` in log-probability; of `tokens` some were `skipped`, because their gap was unclear
    or because they come after a difference; `unequal` differ although they must not."""

    dtype: str
    max_error: float
    tokens: int
    skipped: int
    unequal: int

    @property
    def complaint(self) -> str:
        """The broken promise; empty if none."""
        if self.max_error > (TOLERANCE if self.dtype == "float32" else sys.float_info.max):
            return f"log-probabilities differ by {self.max_error:.1e}"
        if self.unequal:
            return f"{self.unequal} tokens differ"
        if self.tokens - self.skipped < ENOUGH[self.dtype] * self.tokens or not self.tokens:
            return f"only {self.tokens - self.skipped} of {self.tokens} tokens could be compared"
        return ""


def judge(dtype: str, answers: Iterable[tuple[Answer, Tensor, bool]]) -> PathVerdict:
    """Judge each answer by the reference's distributions `[tokens, vocab]`, and a flag that its experts were clearly
    chosen."""
    error, tokens, skipped, unequal = 0.0, 0, 0, 0
    for answer, expected, is_clear in answers:
        tokens += len(answer.chosen)
        if not is_clear:
            skipped += len(answer.chosen)
            continue
        rows = list(zip(answer.chosen, answer.best, expected, strict=True))
        look = _look_exactly if dtype == "float32" else _look_nearby
        for place, (chosen, best, row) in enumerate(rows):
            off = largest(abs(float(row[token]) - logprob) for token, logprob in best)
            is_compared, is_equal, is_last = look(chosen, best, row, off)
            error = max(error, off) if is_compared or dtype == "float32" else error
            skipped += not is_compared
            unequal += is_compared and not is_equal
            if is_last:
                skipped += len(rows) - place - 1
                break
    return PathVerdict(dtype, error, tokens, skipped, unequal)


def _look_exactly(chosen: int, _best: list[tuple[int, float]], row: Tensor, off: float) -> tuple[bool, bool, bool]:
    """Return if it is compared, if it is right, and if later tokens no longer count."""
    two = row.topk(2)
    is_clear = float(two.values[0] - two.values[1]) > CLEAR_GAP * max(off, 1e-7)
    return is_clear, int(two.indices[0]) == chosen, False


def _look_nearby(chosen: int, best: list[tuple[int, float]], row: Tensor, _off: float) -> tuple[bool, bool, bool]:
    theirs = row.topk(NEAR).indices.tolist()
    ours = [token for token, _ in sorted(best, key=lambda pair: -pair[1])[:NEAR]]
    return True, chosen in theirs and theirs[0] in ours, theirs[0] != chosen
