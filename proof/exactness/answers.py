"""Compares answers to prompts with transformers: in fp32 by numbers, in bfloat16 by the best tokens."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.rpc.v1 import worker_pb2 as w

TOLERANCE = 1e-4
CLEAR_GAP = 10.0
"""Greedy tokens must be equal where the reference's best two differ by more than this many times the error."""
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """`max_error` in log-probability; `unequal` counts greedy tokens that differ although the gap was clear."""

    max_error: float
    tokens: int
    clear_tokens: int
    unequal: int

    @property
    def is_exact(self) -> bool:
        return self.max_error <= TOLERANCE and self.unequal == 0


def largest(differences: Iterable[float]) -> float:
    """The largest; infinity if one of them is NaN, which `max` may pass over."""
    return max(math.inf if math.isnan(difference) else difference for difference in differences)


def compare(chunks: Sequence[w.TokenChunk], expected: Tensor, *, is_greedy: bool) -> Verdict:
    """Every reported log-probability (chosen and top ones) against the reference's distribution at its place."""
    error, clear, unequal = 0.0, 0, 0
    for chunk, row in zip(chunks, expected, strict=True):
        (reported,) = chunk.logprobs
        pairs = [(reported.token, reported.logprob), *((top.token, top.logprob) for top in reported.top)]
        here = largest(abs(float(row[token]) - logprob) for token, logprob in pairs)
        error = max(error, here)
        if is_greedy:
            best = row.topk(2)
            if float(best.values[0] - best.values[1]) > CLEAR_GAP * max(here, 1e-7):
                clear += 1
                unequal += int(best.indices[0]) != chunk.tokens[0]
    return Verdict(error, len(chunks), clear, unequal)
