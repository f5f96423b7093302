"""choose_token for the GPU: one program a row searches over the bits of its scores, two at a time. Not yet timed.

A search reads the row sixteen times, out of the second-level cache; rows without top-k or top-p skip that search.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels import triton_tiles


@triton.jit
def _tile(scores_ptr, start, vocab, TILE: tl.constexpr):
    """Keys and weights of a piece of a row: a key rises as scores fall; past the end the key is the largest."""
    places = start + tl.arange(0, TILE)
    scores = tl.load(scores_ptr + places, mask=places < vocab, other=float("-inf"))
    return tl.abs(scores).to(tl.int32, bitcast=True), tl.exp(scores).to(tl.float64)


@triton.jit
def _smallest(scores_ptr, vocab, wanted, BY_COUNT: tl.constexpr, IS_STRICT: tl.constexpr, TILE: tl.constexpr):
    """Return the smallest key up to which tokens (BY_COUNT) or mass reach `wanted`, or pass it (IS_STRICT).

    31 bits: fifteen pairs and a single one; two of its three candidates are superfluous but never wrong.
    """
    found = 0
    for step in range(16):
        shift = tl.maximum(29 - 2 * step, 0)
        one = found + (1 << shift) - 1
        two = one + (1 << shift)
        three = two + (1 << shift)
        up_to_one = tl.zeros([TILE], tl.float64)
        up_to_two = tl.zeros([TILE], tl.float64)
        up_to_three = tl.zeros([TILE], tl.float64)
        for start in range(0, vocab, TILE):
            keys, weights = _tile(scores_ptr, start, vocab, TILE)
            if BY_COUNT:
                weights = (start + tl.arange(0, TILE) < vocab).to(tl.float64)
            up_to_one += tl.where(keys <= one, weights, 0.0)
            up_to_two += tl.where(keys <= two, weights, 0.0)
            up_to_three += tl.where(keys <= three, weights, 0.0)
        if IS_STRICT:
            digit = (tl.sum(up_to_one, 0) <= wanted).to(tl.int32) + (tl.sum(up_to_two, 0) <= wanted).to(tl.int32)
            digit += (tl.sum(up_to_three, 0) <= wanted).to(tl.int32)
        else:
            digit = (tl.sum(up_to_one, 0) < wanted).to(tl.int32) + (tl.sum(up_to_two, 0) < wanted).to(tl.int32)
            digit += (tl.sum(up_to_three, 0) < wanted).to(tl.int32)
        found += digit << shift
    return found


@triton.jit
def _edge(scores_ptr, vocab, limit, TILE: tl.constexpr):
    """Mass before a key; weight of one token that has it; how many have it."""
    before = tl.zeros([TILE], tl.float64)
    weight = tl.zeros([TILE], tl.float64)
    ties = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        keys, weights = _tile(scores_ptr, start, vocab, TILE)
        before += tl.where(keys < limit, weights, 0.0)
        weight = tl.maximum(weight, tl.where(keys == limit, weights, 0.0))
        ties += (keys == limit).to(tl.int32)
    return tl.sum(before, 0), tl.max(weight, 0), tl.sum(ties, 0)


@triton.jit(do_not_specialize=["vocab"])
def _choose_kernel(
    scores_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniforms_ptr, out_ptr, stride, vocab, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)

    whole = tl.zeros([TILE], tl.float64)
    likely = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab, TILE):
        _, weights = _tile(scores_ptr, start, vocab, TILE)
        whole += weights
        likely += tl.where(weights >= min_p, weights, 0.0)
    kept = tl.sum(whole, 0)
    if top_k > 0:
        before, weight, ties = _edge(
            scores_ptr, vocab, _smallest(scores_ptr, vocab, top_k.to(tl.float64), True, False, TILE), TILE
        )
        kept = before + weight * ties.to(tl.float64)
    if top_p < 1.0:
        wanted = top_p * kept
        before, weight, ties = _edge(scores_ptr, vocab, _smallest(scores_ptr, vocab, wanted, False, False, TILE), TILE)
        needed = tl.maximum(tl.ceil((wanted - before) / weight), 1.0)
        kept = tl.minimum(kept, before + tl.minimum(needed, ties.to(tl.float64)) * weight)
    # Each filter keeps the first so many tokens of one order: together they keep what the strictest one does.
    kept = tl.minimum(kept, tl.sum(likely, 0))

    target = tl.minimum(tl.load(uniforms_ptr + row), 1.0 - 2.0**-52) * kept
    place = _smallest(scores_ptr, vocab, target, False, True, TILE)
    before, weight, ties = _edge(scores_ptr, vocab, place, TILE)
    order = tl.minimum(tl.maximum(tl.floor((target - before) / weight), 0.0).to(tl.int32), ties - 1)
    token = 0
    seen = 0
    for start in range(0, vocab, TILE):
        keys, _ = _tile(scores_ptr, start, vocab, TILE)
        has_key = (keys == place).to(tl.int32)
        is_chosen = (has_key > 0) & (seen + tl.cumsum(has_key, 0) == order + 1)
        token += tl.sum(tl.where(is_chosen, start + tl.arange(0, TILE), 0), 0)
        seen += tl.sum(has_key, 0)
    tl.store(out_ptr + row, token.to(tl.int64))


def choose_token_triton(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor:
    """See `choose_token`; numbers of a row are neighbours."""
    rows, vocab = scores.shape
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        _choose_kernel[(rows,)](
            scores, top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), uniforms.contiguous(), out,
            scores.stride(0), vocab, TILE=triton_tiles.CHOOSE_TILE, num_warps=triton_tiles.CHOOSE_WARPS,
        )  # fmt: skip
    return out
