"""Chooses the likeliest tokens, or draws some by inverse CDF, with top-k, top-p and min-p.

Each row's token depends on that row alone.

Unfiltered rows use the CDF in token-id order: no sort. Filtered rows use the order of falling scores (equal scores by
rising id) over a short list of candidates, and over the whole vocabulary only where the list proves too short. On an
accelerator they are searched, not sorted, and the host is not asked (`choose_token`): the same tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.kernels.sample import choose_token

CANDIDATES = 256
_PIECE, _FEW = 256, 4
"""Numbers of which a CPU finds the largest without its place, as torch searches for places number by number; and rows
for which that one search costs no more than the operations that avoid it."""


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row of `[n, vocab]`, `[n]`, and the first token that has it, int64 `[n]`.

    NaN is larger than any number, as in torch.
    """
    rows, vocab = scores.shape
    width = math.gcd(vocab, _PIECE)
    if scores.device.type != "cpu" or rows < _FEW or width < _PIECE // 8 or not scores.is_contiguous():
        values, best = scores.max(dim=-1)
        return values, best
    pieces = scores.view(rows, -1, width)
    values, piece = pieces.amax(dim=-1).max(dim=-1)
    own = pieces.gather(1, piece[:, None, None].expand(rows, 1, width))[:, 0]
    return values, own.argmax(dim=-1).add_(piece, alpha=width)


def choose_unfiltered(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens int64 [n] from the softmax of `scores` fp32 [n, vocab]; `uniforms` float64 [n] in [0, 1)."""
    cdf = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return _places(cdf, uniforms)[:, 0]


def choose_filtered(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """As `choose_unfiltered` after top_k (int64 [n], 0: off), then top_p and min_p (float64 [n], 1 and 0: off).

    Each row's best score is 0.
    """
    if scores.device.type != "cpu":
        return choose_token(scores, top_k, top_p, min_p, uniforms)
    vocab = scores.shape[1]
    width = min(vocab, max(CANDIDATES, int(top_k.max()) + 1))
    ids, kept, is_complete = kept_probabilities(scores, top_k, top_p, min_p, width)
    tokens = _draw(ids, kept, uniforms)
    if width < vocab and not bool(is_complete.all()):
        rows = (~is_complete).nonzero()[:, 0]
        ids, kept, _ = kept_probabilities(scores[rows], top_k[rows], top_p[rows], min_p[rows], vocab)
        tokens[rows] = _draw(ids, kept, uniforms[rows])
    return tokens


def kept_probabilities(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, probabilities, is_complete) of each row's `width` best tokens; 0 where a filter removed one.

    `is_complete` is False where a token outside of the list might belong to the kept ones.
    """
    values, ids = _best(scores, width)
    probabilities = scores.softmax(dim=-1).gather(1, ids)
    has_k = top_k > 0
    kth = values.gather(1, (top_k.clamp(min=1, max=width) - 1)[:, None])
    keep = ~has_k[:, None] | (values >= kth)
    mass = (probabilities * keep).cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(has_k, mass[:, -1], torch.ones_like(mass[:, -1]))
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    # Holtzman et al. 2020: the smallest set with a mass of top_p, so a token stays while less is before it.
    keep &= (top_p >= 1.0)[:, None] | (before < (top_p * total)[:, None])
    keep &= probabilities >= min_p[:, None] * probabilities[:, :1]
    keep &= values > -math.inf  # forbidden tokens; without this, a list with one of them would count as too short
    last = values.gather(1, keep.sum(dim=-1, keepdim=True) - 1)[:, 0]
    return ids, probabilities * keep, values[:, -1] < last


def _best(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best scores and their ids, falling, equal ones by rising id."""
    if width == scores.shape[1]:
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    values, ids = scores.topk(width, dim=-1)
    if not bool((values[:, 1:] == values[:, :-1]).any()):
        return values, ids
    ids = ids.sort(dim=-1).values  # topk leaves equal scores in any order
    ordered = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def _draw(ids: Tensor, kept: Tensor, uniforms: Tensor) -> Tensor:
    cdf = kept.cumsum(dim=-1, dtype=torch.float64)
    return ids.gather(1, _places(cdf, uniforms))[:, 0]


def _places(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """First place [n, 1] of each row at which the CDF is above uniform · total: it always exists and has mass."""
    total = cdf[:, -1]
    # Rounding can lift the product to the total itself, which nothing is above.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True)
