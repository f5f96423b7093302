"""paged_decode for the GPU: split-KV attention and the reduction of its partial results.

A program reads one split of one sequence's keys and values for one kv head, once for the whole GQA group: its heads
are the rows of the products. With more than one split, partial (maximum, total, accumulated) go through fp32 scratch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.triton_attention import attend_tiles, merge_splits, processors, score_factors, with_sink
from tandem.kernels.triton_tiles import decode_splits, decode_tile


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _split_kernel(
    q_ptr,
    view_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    statistics_ptr,
    q_stride,
    table_stride,
    stride_block,
    stride_plane,
    stride_head,
    splits,
    scale_log2,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(lens_ptr + sequence)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_WIDTH)
    heads = kv_head * GROUP + rows
    used = (rows[:, None] < GROUP) & (dims[None, :] < WIDTH)
    in_head = heads[:, None] * WIDTH + dims[None, :]
    q = tl.load(q_ptr + sequence * q_stride + in_head, mask=used, other=0.0)

    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(context - WINDOW, 0) // TILE
    end_tile = tl.cdiv(context, TILE)
    split_tiles = tl.cdiv(end_tile - first_tile, splits)
    split_first = first_tile + split * split_tiles
    split_end = tl.minimum(split_first + split_tiles, end_tile)
    k_ptr = view_ptr + kv_head.to(tl.int64) * stride_head
    maximum, total, accumulated = attend_tiles(
        q, split_first, split_end, context - 1, context - 1, context - 1 + tl.zeros([ROWS], tl.int32),
        table_ptr + sequence * table_stride, k_ptr, k_ptr + stride_plane, stride_block, scale_log2, softcap, ROWS,
        BLOCK_TOKENS, WIDTH, PADDED_WIDTH, TILE, WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    q_heads = tl.num_programs(1) * GROUP
    if not IS_SPLIT:
        if HAS_SINKS:
            total = with_sink(maximum, total, sinks_ptr, heads, rows < GROUP)
        out = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_ptr + sequence * q_heads * WIDTH + in_head, out.to(out_ptr.dtype.element_ty), mask=used)
    else:
        place = (sequence * q_heads + heads) * splits + split
        tl.store(partial_ptr + place[:, None] * WIDTH + dims[None, :], accumulated, mask=used)
        tl.store(statistics_ptr + place * 2, maximum, mask=rows < GROUP)
        tl.store(statistics_ptr + place * 2 + 1, total, mask=rows < GROUP)


def paged_decode_triton(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `paged_decode`."""
    batch, q_heads, width = q.shape
    kv_heads, block_tokens = layer_view.shape[2], layer_view.shape[3]
    padded_width = max(16, triton.next_power_of_2(width))
    tile, warps, stages = decode_tile(padded_width, max(q.element_size(), layer_view.element_size()))
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    readable = min(table.shape[1] * block_tokens, spec.window or table.shape[1] * block_tokens)
    splits = decode_splits(batch * kv_heads, readable, processors(q.device))
    out = torch.empty((batch, q_heads, width), dtype=q.dtype, device=q.device)
    partial, statistics, sinks = out, out, out if spec.sinks is None else spec.sinks
    if splits > 1:
        partial = torch.empty((batch, q_heads, splits, width), dtype=torch.float32, device=q.device)
        statistics = torch.empty((batch, q_heads, splits, 2), dtype=torch.float32, device=q.device)
    scale_log2, softcap = score_factors(spec.scale, spec.softcap)
    group = q_heads // kv_heads
    _split_kernel[(batch, kv_heads, splits)](
        q, layer_view, table, context_lens, sinks, out, partial, statistics, q.stride(0), table.stride(0),
        layer_view.stride(0), layer_view.stride(1), layer_view.stride(2), splits, scale_log2, softcap,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), IS_SPLIT=splits > 1, BLOCK_TOKENS=block_tokens,
        WIDTH=width, PADDED_WIDTH=padded_width, TILE=tile, WINDOW=spec.window or 0,
        HAS_SOFTCAP=spec.softcap is not None, HAS_SINKS=spec.sinks is not None, PRECISION="ieee", num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        merge_splits(partial, statistics, spec.sinks, out)
    return out
