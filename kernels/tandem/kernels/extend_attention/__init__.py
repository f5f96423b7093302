"""Prefill attention: a chunk of query tokens of each sequence over its paged keys and values."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.cpu_library import library_of
from tandem.kernels.extend_attention import flash
from tandem.kernels.extend_attention.reference import extend_attention_reference
from tandem.kernels.layer_view import KEY_PLANE, VALUE_PLANE, check_attention_arguments, check_cu_seqlens

__all__ = ["LIBRARY", "WIDTHS", "extend_attention", "is_native", "room_bytes"]

LIBRARY = library_of("extend_attention")
WIDTHS = range(32, 257, 32)
"""Of heads that the C code has."""
_STEP = 32
_MOST_TOKENS = 2**31 - 1  # positions are int32
_SHORT, _OUTSIDE, _NO_ROWS = 1, 2, 3  # enum answer
_AVX2 = 3  # what tandem_choose_path answers


def extend_attention(
    q: Tensor,
    layer_view: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attend from the last tokens of every sequence, causally. Their keys and values must already be stored.

    q: `[total_tokens, q_heads, width]`, sequences one after the other.
    layer_view: `[num_blocks, 2, kv_heads, block_tokens, width]`; another dtype than that of q is converted when read.
    cu_seqlens: int32 `[n + 1]`; sequence i owns query rows `cu_seqlens[i] : cu_seqlens[i + 1]`.
    block_table: int32 `[n, max_blocks]`. Entries past the context, or wholly before the window of a sequence's first
    query, are never read.
    context_lens: int32 `[n]`, tokens stored including this chunk: query j of c sits at position context - c + j.
    scale, window, softcap, sinks: see `AttentionSpec`.
    Returns `[total_tokens, q_heads, width]` in the dtype of `q`; rows past `cu_seqlens[n]` are undefined. Raises
    ValueError (shapes) or TypeError (dtypes). On CUDA it never synchronises; the grid depends on shapes alone.
    Source: FlashAttention-2 (Dao 2023), section 3.1; chunked prefill after Sarathi (Agrawal et al. 2023).
    """
    check_attention_arguments(q, layer_view, block_table, context_lens)
    check_cu_seqlens(cu_seqlens, block_table.shape[0])
    spec = AttentionSpec(scale=scale, window=window, softcap=softcap, sinks=sinks)
    spec.check_sinks(q.shape[1])
    if q.shape[0] == 0 or block_table.shape[0] == 0:
        return torch.empty_like(q)
    if uses_triton(q.device, backend):
        from tandem.kernels.extend_attention.triton import extend_attention_triton

        return extend_attention_triton(q, layer_view, cu_seqlens, block_table, context_lens, spec)
    if uses_native(q.device, backend):
        if is_native(q, layer_view):
            return _extend_by_code(q, layer_view, cu_seqlens, block_table, context_lens, spec)
        if flash.takes(q, block_table, spec):
            return flash.extend_attention_flash(q, layer_view, cu_seqlens, block_table, context_lens, spec)
    return extend_attention_reference(q, layer_view, cu_seqlens, block_table, context_lens, spec)


def is_native(q: Tensor, layer_view: Tensor) -> bool:
    """True if the C code is available and has this case.

    Measured beside torch's flash kernel on two cores: half of its time with a matrix unit, a fifth to a seventh with
    vectors on a machine that has none (torch multiplies on the matrix unit where there is one, and hardly at all in
    bfloat16 where there is none)."""
    is_bf16 = q.dtype is torch.bfloat16 and layer_view.dtype is torch.bfloat16
    return is_bf16 and q.shape[2] in WIDTHS and LIBRARY.is_available()


def _extend_by_code(
    q: Tensor, layer_view: Tensor, cu_seqlens: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """For cases that are native. Runs on as many threads as torch does."""
    tokens, q_heads, width = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    cu_seqlens, context_lens = cu_seqlens.contiguous(), context_lens.contiguous()
    num_blocks, _, kv_heads, block_tokens, _ = layer_view.shape
    blocks, planes, heads = layer_view.stride()[:3]
    room = torch.empty(room_bytes(block_table.shape[1] * block_tokens, kv_heads, width), dtype=torch.uint8)
    out = torch.empty((tokens, q_heads, width), dtype=q.dtype)
    (softcap,) = struct.unpack("q", struct.pack("d", spec.softcap or 0.0))
    answer = LIBRARY.call((
        num_blocks, block_table.shape[1], tokens, q.data_ptr(), layer_view.data_ptr(), out.data_ptr(),
        block_table.data_ptr(), cu_seqlens.data_ptr(), context_lens.data_ptr(),
        0 if spec.sinks is None else spec.sinks.data_ptr(), room.data_ptr(),
        context_lens.shape[0], kv_heads, q_heads // kv_heads, width, block_tokens,
        q.stride(0), q.stride(1), block_table.stride(0), blocks * 2, planes * (VALUE_PLANE - KEY_PLANE) * 2, heads * 2,
        min(spec.window or 0, _MOST_TOKENS), torch.get_num_threads(), softcap,
    ), spec.scale)  # fmt: skip
    if answer == _OUTSIDE:
        raise IndexError("block_table or context_lens name blocks that the pool or the table does not have")
    if answer == _NO_ROWS:
        raise ValueError(f"cu_seqlens names rows that q does not have: it has {tokens}")
    if answer == _SHORT:
        raise ValueError("a sequence has more queries than tokens in its context")
    return out


def room_bytes(context: int, kv_heads: int, width: int) -> int:
    """Bytes of memory into which keys and values of the longest sequence of a call, or more, are packed."""
    number_bytes = 4 if LIBRARY.path == _AVX2 else 2
    return 64 + 2 * number_bytes * kv_heads * width * -(-(context + _STEP - 1) // _STEP) * _STEP
