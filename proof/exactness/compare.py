"""Compares an answer handed over from a prefill to a decode rank with the reference. Pure comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.rpc.v1 import worker_pb2 as w

TOLERANCE = 1e-4
CLEAR_GAP = 10.0
"""Greedy tokens must be equal where the reference's best two differ by more than this many times the error."""


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
