"""latent_decode for the GPU: split-KV attention that reuses keys as values. Not yet timed on a device.

A program reads one split of one sequence's rows, once, for a tile of its heads, which are the rows of the products:

    scores  = q's latent part · latents + q's turned part · turned keys
    answers = weights · latents                                             the same tile, without a second load

Tiles of heads of one sequence are neighbours in the grid, so that rows read by one are in the L2 cache for the others.
Partial results of several splits are merged as those of `paged_decode`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton_attention import merge_splits, processors, score_factors
from tandem.kernels.triton_tiles import decode_splits, latent_tile


@triton.jit
def _attend_rows(
    q,
    q_turned,
    maximum,
    total,
    accumulated,
    tile_start,
    context,
    table_ptr,
    rows_ptr,
    stride_block,
    scale_log2,
    BLOCK_TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    TURNED: tl.constexpr,
    PADDED_TURNED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold one tile of cached rows into the online softmax of the heads. MASKED: the tile reaches past `context`."""
    tokens = tile_start + tl.arange(0, TILE)
    dims, turned_dims = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_TURNED)
    readable = tokens < context
    if MASKED:
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS, mask=readable, other=0)
    else:
        blocks = tl.load(table_ptr + tokens // BLOCK_TOKENS)
    rows = (blocks.to(tl.int64) * stride_block + (tokens % BLOCK_TOKENS) * (RANK + TURNED))[:, None]
    if MASKED or RANK != PADDED_RANK:
        latent = tl.load(rows_ptr + rows + dims[None, :], mask=readable[:, None] & (dims[None, :] < RANK), other=0.0)
    else:
        latent = tl.load(rows_ptr + rows + dims[None, :])
    turned_ptrs = rows_ptr + rows + RANK + turned_dims[None, :]
    if MASKED or TURNED != PADDED_TURNED:
        turned = tl.load(turned_ptrs, mask=readable[:, None] & (turned_dims[None, :] < TURNED), other=0.0)
    else:
        turned = tl.load(turned_ptrs)
    latent = latent.to(q.dtype)  # the pool's numbers may be stored in another dtype
    scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
    scores += tl.dot(q_turned, tl.trans(turned.to(q.dtype)), input_precision=PRECISION)
    scores *= scale_log2
    if MASKED:
        scores = tl.where(readable[None, :], scores, float("-inf"))
    # A tile has at least one token within the context: the maximum is finite.
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    kept = tl.exp2(maximum - new_maximum)
    total = total * kept + tl.sum(weights, 1)
    accumulated = accumulated * kept[:, None] + tl.dot(weights.to(q.dtype), latent, input_precision=PRECISION)
    return new_maximum, total, accumulated


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _latent_kernel(
    q_ptr,
    rows_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    partial_ptr,
    statistics_ptr,
    q_stride,
    table_stride,
    stride_block,
    splits,
    scale_log2,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    TURNED: tl.constexpr,
    PADDED_TURNED: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + sequence)
    dims, turned_dims = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_TURNED)
    is_head = heads < HEADS
    used = is_head[:, None] & (dims[None, :] < RANK)
    q_ptrs = q_ptr + sequence * q_stride + heads[:, None] * (RANK + TURNED)
    q = tl.load(q_ptrs + dims[None, :], mask=used, other=0.0)
    turned_used = is_head[:, None] & (turned_dims[None, :] < TURNED)
    q_turned = tl.load(q_ptrs + RANK + turned_dims[None, :], mask=turned_used, other=0.0)

    end_tile = tl.cdiv(context, TILE)
    split_tiles = tl.cdiv(end_tile, splits)
    split_first = split * split_tiles
    split_end = tl.minimum(split_first + split_tiles, end_tile)
    whole_end = tl.minimum(context // TILE, split_end)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    accumulated = tl.zeros([ROWS, PADDED_RANK], tl.float32)
    table_ptr += sequence * table_stride
    for tile in range(split_first, whole_end):
        maximum, total, accumulated = _attend_rows(
            q, q_turned, maximum, total, accumulated, tile * TILE, context, table_ptr, rows_ptr, stride_block,
            scale_log2, BLOCK_TOKENS, RANK, PADDED_RANK, TURNED, PADDED_TURNED, TILE, False, PRECISION,
        )  # fmt: skip
    for tile in range(tl.maximum(split_first, whole_end), split_end):
        maximum, total, accumulated = _attend_rows(
            q, q_turned, maximum, total, accumulated, tile * TILE, context, table_ptr, rows_ptr, stride_block,
            scale_log2, BLOCK_TOKENS, RANK, PADDED_RANK, TURNED, PADDED_TURNED, TILE, True, PRECISION,
        )  # fmt: skip
    if not IS_SPLIT:
        out = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        place = (sequence * HEADS + heads)[:, None] * RANK + dims[None, :]
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=used)
    else:
        place = (sequence * HEADS + heads) * splits + split
        tl.store(partial_ptr + place[:, None] * RANK + dims[None, :], accumulated, mask=used)
        tl.store(statistics_ptr + place * 2, maximum, mask=is_head)
        tl.store(statistics_ptr + place * 2 + 1, total, mask=is_head)


def latent_decode_triton(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, rank: int, scale: float
) -> Tensor:
    """See `latent_decode`."""
    batch, heads, width = q.shape
    block_tokens, turned = layer_view.shape[3], width - rank
    padded_rank = max(16, triton.next_power_of_2(rank))
    cut = latent_tile(heads, padded_rank, max(q.element_size(), layer_view.element_size()))
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    head_tiles = triton.cdiv(heads, cut.rows)
    splits = decode_splits(
        batch * head_tiles, table.shape[1] * block_tokens, processors(q.device), cut.programs_per_processor
    )
    out = torch.empty((batch, heads, rank), dtype=q.dtype, device=q.device)
    partial, statistics = out, out
    if splits > 1:
        partial = torch.empty((batch, heads, splits, rank), dtype=torch.float32, device=q.device)
        statistics = torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=q.device)
    _latent_kernel[(head_tiles, batch, splits)](
        q, layer_view, table, context_lens, out, partial, statistics, q.stride(0), table.stride(0),
        layer_view.stride(0), splits, score_factors(scale, None)[0], HEADS=heads, ROWS=cut.rows, IS_SPLIT=splits > 1,
        BLOCK_TOKENS=block_tokens, RANK=rank, PADDED_RANK=padded_rank, TURNED=turned,
        PADDED_TURNED=max(16, triton.next_power_of_2(turned)), TILE=cut.tile, PRECISION="ieee", num_warps=cut.warps,
        num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits(partial, statistics, None, out)
    return out
