"""Parts of the attention kernels for the GPU that they share: the loop over key tiles, and the merging of splits.

Owns one program's walk over the keys of one (sequence, kv head): three loops, so that only tiles on an edge pay for
masks. Scores are kept in units of log2, for the hardware has exp2. Block offsets are int64: a pool passes 2^31 numbers.
Imported by the ops' `triton.py` alone, never at start.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def attend_tile(
    q,
    maximum,
    total,
    accumulated,
    tile_start,
    positions,
    readable_from,
    readable_to,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_block,
    scale_log2,
    softcap,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of keys into the online softmax of `q`'s rows.

    MASKED: some row must not see some key of the tile, or the tile reaches outside `readable_from : readable_to`.
    Unmasked rows without a query compute numbers that are never stored.
    """
    tokens = tile_start + tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_WIDTH)
    if MASKED:
        readable = (tokens >= readable_from) & (tokens < readable_to)
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS, mask=readable, other=0)
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS)
    offsets = (blocks.to(tl.int64) * stride_block + (tokens % BLOCK_TOKENS) * WIDTH)[:, None] + dims[None, :]
    if MASKED:
        loaded = readable[:, None] & (dims[None, :] < WIDTH)
        k = tl.load(k_ptr + offsets, mask=loaded, other=0.0)
        v = tl.load(v_ptr + offsets, mask=loaded, other=0.0)
    elif WIDTH != PADDED_WIDTH:
        k = tl.load(k_ptr + offsets, mask=dims[None, :] < WIDTH, other=0.0)
        v = tl.load(v_ptr + offsets, mask=dims[None, :] < WIDTH, other=0.0)
    else:
        k = tl.load(k_ptr + offsets)
        v = tl.load(v_ptr + offsets)
    k = k.to(q.dtype)  # the pool's numbers may be stored in another dtype
    v = v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    if HAS_SOFTCAP:
        # scores hold s / softcap * 2 log2(e); tanh(x) = 1 - 2 / (exp(2x) + 1); softcap carries the factor log2(e).
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    if MASKED:
        visible = readable[None, :] & (tokens[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
    weights = tl.exp2(scores - finite[:, None])
    kept = tl.exp2(maximum - finite)
    total = total * kept + tl.sum(weights, 1)
    accumulated = accumulated * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_maximum, total, accumulated


@triton.jit
def attend_tiles(
    q,
    first_tile,
    end_tile,
    first_position,
    last_position,
    positions,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_block,
    scale_log2,
    softcap,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from rows at `positions` (within first ... last) to key tiles `first_tile : end_tile`.

        tiles   | window's edge | seen whole by every row | diagonal and end |
                          whole_from                 whole_to

    Returns (maximum, total, accumulated) in units of log2; a row that saw no key has maximum -inf and total 0.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, PADDED_WIDTH], tl.float32)
    readable_from = 0
    whole_from = first_tile
    if WINDOW > 0:
        readable_from = tl.maximum(first_position - WINDOW + 1, 0)
        whole_from = tl.maximum(tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE), first_tile)
    whole_to = tl.minimum((first_position + 1) // TILE, end_tile)
    readable_to = last_position + 1
    if WINDOW > 0:
        for tile in range(first_tile, tl.minimum(whole_from, end_tile)):
            maximum, total, accumulated = attend_tile(
                q, maximum, total, accumulated, tile * TILE, positions, readable_from, readable_to, table_ptr,
                k_ptr, v_ptr, stride_block, scale_log2, softcap, BLOCK_TOKENS, WIDTH, PADDED_WIDTH, TILE, WINDOW,
                HAS_SOFTCAP, True, PRECISION,
            )  # fmt: skip
    for tile in range(whole_from, whole_to):
        maximum, total, accumulated = attend_tile(
            q, maximum, total, accumulated, tile * TILE, positions, readable_from, readable_to, table_ptr,
            k_ptr, v_ptr, stride_block, scale_log2, softcap, BLOCK_TOKENS, WIDTH, PADDED_WIDTH, TILE, WINDOW,
            HAS_SOFTCAP, False, PRECISION,
        )  # fmt: skip
    for tile in range(tl.maximum(whole_from, whole_to), end_tile):
        maximum, total, accumulated = attend_tile(
            q, maximum, total, accumulated, tile * TILE, positions, readable_from, readable_to, table_ptr,
            k_ptr, v_ptr, stride_block, scale_log2, softcap, BLOCK_TOKENS, WIDTH, PADDED_WIDTH, TILE, WINDOW,
            HAS_SOFTCAP, True, PRECISION,
        )  # fmt: skip
    return maximum, total, accumulated


@triton.jit
def with_sink(maximum, total, sinks_ptr, heads, used):
    """`total` of rows, relative to `maximum`, with the sinks of their query heads; `used` where there is one."""
    sink = tl.load(sinks_ptr + heads, mask=used, other=float("-inf")) * _LOG2_E
    return total + tl.exp2(sink - tl.where(maximum == float("-inf"), 0.0, maximum))


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(
    partial_ptr,
    statistics_ptr,
    sinks_ptr,
    out_ptr,
    splits,
    Q_HEADS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_WIDTH)
    is_part = parts < splits
    maxima = tl.load(statistics_ptr + (row * splits + parts) * 2, mask=is_part, other=float("-inf"))
    totals = tl.load(statistics_ptr + (row * splits + parts) * 2 + 1, mask=is_part, other=0.0)
    maximum = tl.max(maxima, 0)
    weights = tl.exp2(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(totals * weights, 0)
    if HAS_SINKS:
        total = with_sink(maximum, total, sinks_ptr, row % Q_HEADS, True)
    used = is_part[:, None] & (dims[None, :] < WIDTH)
    partial = tl.load(partial_ptr + (row * splits + parts)[:, None] * WIDTH + dims[None, :], mask=used, other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * WIDTH + dims, out.to(out_ptr.dtype.element_ty), mask=dims < WIDTH)


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The two numbers `attend_tile` wants: the factor of q.k, and the cap in units of log2 (1.0 without one)."""
    if softcap is None:
        return scale * LOG2_E, 1.0
    return scale / softcap * 2.0 * LOG2_E, softcap * LOG2_E


def merge_splits(partial: Tensor, statistics: Tensor, sinks: Tensor | None, out: Tensor) -> None:
    """Merge splits into `out` [batch, heads, width]: fp32 `partial` [batch, heads, splits, width], not divided by their
    totals, and `statistics` [batch, heads, splits, 2], each split's maximum and total."""
    batch, heads, splits, width = partial.shape
    _reduce_kernel[(batch * heads,)](
        partial, statistics, out if sinks is None else sinks, out, splits, Q_HEADS=heads,
        PADDED_SPLITS=triton.next_power_of_2(splits), WIDTH=width, PADDED_WIDTH=max(16, triton.next_power_of_2(width)),
        HAS_SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a small number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
