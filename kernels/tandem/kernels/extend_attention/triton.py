"""extend_attention for the GPU: one program a (tile of query tokens, kv head).

Rows of a tile are query tokens x GQA group, token slowest, so that a key tile is read once for the whole group. The
grid is an upper bound from shapes alone: sequence i owns the programs from `cu_seqlens[i] // TILE_QUERIES + i`, and a
program finds its sequence by bisection; one too many exits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.triton_attention import attend_tiles, score_factors, with_sink
from tandem.kernels.triton_tiles import extend_tile


@triton.jit
def _find_sequence(cu_seqlens_ptr, sequences, program, TILE_QUERIES: tl.constexpr):
    """Return the last sequence with a first program that is not after `program`."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // TILE_QUERIES + middle <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["sequences", "table_stride"])
def _extend_kernel(
    q_ptr,
    view_ptr,
    cu_seqlens_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    sequences,
    q_stride,
    out_stride,
    table_stride,
    stride_block,
    stride_plane,
    stride_head,
    scale_log2,
    softcap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last tiles see the most keys: those that start first
    kv_head = tl.program_id(1)
    sequence = _find_sequence(cu_seqlens_ptr, sequences, program, TILE_QUERIES)
    begin = tl.load(cu_seqlens_ptr + sequence)
    end = tl.load(cu_seqlens_ptr + sequence + 1)
    first_query = (program - (begin // TILE_QUERIES + sequence)) * TILE_QUERIES
    if first_query < end - begin:
        past = tl.load(lens_ptr + sequence) - (end - begin)
        last_query = tl.minimum(first_query + TILE_QUERIES, end - begin) - 1
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, PADDED_WIDTH)
        queries = first_query + rows // GROUP
        row_used = (rows < TILE_QUERIES * GROUP) & (queries <= last_query)
        used = row_used[:, None] & (dims[None, :] < WIDTH)
        in_token = ((kv_head * GROUP + rows % GROUP) * WIDTH)[:, None] + dims[None, :]
        tokens = (begin + queries).to(tl.int64)[:, None]
        q = tl.load(q_ptr + tokens * q_stride + in_token, mask=used, other=0.0)

        first_position = past + first_query
        last_position = past + last_query
        first_tile = 0
        if WINDOW > 0:
            first_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        k_ptr = view_ptr + kv_head.to(tl.int64) * stride_head
        maximum, total, accumulated = attend_tiles(
            q, first_tile, tl.cdiv(last_position + 1, TILE), first_position, last_position,
            tl.where(row_used, past + queries, -1), table_ptr + sequence.to(tl.int64) * table_stride, k_ptr,
            k_ptr + stride_plane, stride_block, scale_log2, softcap, ROWS, BLOCK_TOKENS, WIDTH, PADDED_WIDTH, TILE,
            WINDOW, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
        if HAS_SINKS:
            total = with_sink(maximum, total, sinks_ptr, kv_head * GROUP + rows % GROUP, row_used)
        out = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_ptr + tokens * out_stride + in_token, out.to(out_ptr.dtype.element_ty), mask=used)


def extend_attention_triton(
    q: Tensor,
    layer_view: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """See `extend_attention`."""
    tokens, q_heads, width = q.shape
    kv_heads = layer_view.shape[2]
    group = q_heads // kv_heads
    padded_width = max(16, triton.next_power_of_2(width))
    rows, tile, warps, stages = extend_tile(padded_width, group, max(q.element_size(), layer_view.element_size()))
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    out = torch.empty((tokens, q_heads, width), dtype=q.dtype, device=q.device)
    tile_queries = rows // group
    sequences = table.shape[0]
    scale_log2, softcap = score_factors(spec.scale, spec.softcap)
    _extend_kernel[(tokens // tile_queries + sequences, kv_heads)](
        q, layer_view, cu_seqlens, table, context_lens, q if spec.sinks is None else spec.sinks, out, sequences,
        q.stride(0), out.stride(0), table.stride(0), layer_view.stride(0), layer_view.stride(1), layer_view.stride(2),
        scale_log2, softcap,
        GROUP=group, ROWS=rows, TILE_QUERIES=tile_queries, BLOCK_TOKENS=layer_view.shape[3], WIDTH=width,
        PADDED_WIDTH=padded_width, TILE=tile, WINDOW=spec.window or 0, HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINKS=spec.sinks is not None, PRECISION="ieee", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
