"""choose_token in torch: the specification. A binary search over the bits of a score replaces sorting.

Scores are at most 0, so that the bits of |score|, read as an integer, are a key that rises as scores fall. Each search
finds the smallest key up to which a sum over the row is large enough: tokens for top-k, mass for top-p and the draw.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_KEY_BITS = 31


def choose_token_reference(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """See `choose_token`."""
    keys, weights = scores.abs().view(torch.int32), scores.exp()

    def mass(limit: Tensor) -> Tensor:
        """Mass of all tokens up to a key."""
        return weights.masked_fill(keys > limit[:, None], 0.0).sum(-1, dtype=torch.float64)

    def edge(limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mass before a key; weight of one token that has it; how many have it."""
        has_key = keys == limit[:, None]
        return mass(limit - 1), (weights * has_key).amax(-1).double(), has_key.sum(-1)

    whole = weights.sum(-1, dtype=torch.float64)
    kth = _smallest(lambda limit: (keys <= limit[:, None]).sum(-1) >= top_k, top_k)
    kept = torch.where(top_k > 0, mass(kth), whole)

    wanted = top_p * kept
    before, weight, ties = edge(_smallest(lambda limit: mass(limit) >= wanted, top_k))
    needed = torch.minimum(((wanted - before) / weight).ceil().clamp(min=1.0), ties)
    nucleus = torch.where(top_p < 1.0, before + needed * weight, whole)
    likely = weights.masked_fill(weights < min_p[:, None], 0.0).sum(-1, dtype=torch.float64)
    # Each filter keeps the first so many tokens of one order: together they keep what the strictest one does.
    kept = torch.minimum(torch.minimum(kept, nucleus), likely)

    target = torch.minimum(uniforms * kept, torch.nextafter(kept, torch.zeros_like(kept)))
    place = _smallest(lambda limit: mass(limit) > target, top_k)
    before, weight, ties = edge(place)
    order = torch.minimum(((target - before) / weight).floor().clamp(min=0.0).long(), ties - 1)
    has_key = keys == place[:, None]
    return (has_key & (has_key.cumsum(-1) == order[:, None] + 1)).int().argmax(-1)


def _smallest(is_enough: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """The smallest key int32 [n] for which `is_enough`, which stays true for all larger ones."""
    found = torch.zeros_like(like, dtype=torch.int32)
    for bit in reversed(range(_KEY_BITS)):
        found += (~is_enough(found + ((1 << bit) - 1))).int() << bit
    return found
