"""Decode attention: one query token a sequence over its paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.cpu_library import DTYPES, library_of
from tandem.kernels.layer_view import check_attention_arguments
from tandem.kernels.paged_decode.reference import paged_decode_reference

__all__ = ["LIBRARY", "is_native", "paged_decode"]

LIBRARY = library_of("paged_decode")
_WIDTHS = range(16, 513, 16)
_NO_MEMORY, _OUTSIDE = 1, 2  # enum answer


def paged_decode(
    q: Tensor,
    layer_view: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attend from the last token of every sequence. Its own key and value must already be stored.

    q: `[batch, q_heads, width]`, query heads of a GQA group are neighbours.
    layer_view: `[num_blocks, 2, kv_heads, block_tokens, width]`; another dtype than that of q is converted when read.
    block_table: int32 `[batch, max_blocks]`. Entries past the context, or wholly before its window, are never read.
    context_lens: int32 `[batch]`, tokens stored; 0 marks a padding row, which yields zeros.
    scale, window, softcap, sinks: see `AttentionSpec`.
    Returns `[batch, q_heads, width]` in the dtype of `q`, owned by the caller. Raises ValueError (shapes) or TypeError
    (dtypes), on the CPU IndexError for a block outside the pool. On CUDA it never synchronises, and its launches depend
    on shapes alone, so that a graph stays valid. On the CPU C code runs where there is a compiler and no window.
    Source: FlashAttention-2 (Dao 2023), section 3.1; split-KV after Flash-Decoding (Dao et al. 2023).
    """
    check_attention_arguments(q, layer_view, block_table, context_lens)
    if q.shape[0] != block_table.shape[0]:
        raise ValueError(f"q has {q.shape[0]} sequences, block_table {block_table.shape[0]}")
    spec = AttentionSpec(scale=scale, window=window, softcap=softcap, sinks=sinks)
    spec.check_sinks(q.shape[1])
    if q.shape[0] == 0:
        return torch.empty_like(q)
    if uses_triton(q.device, backend):
        from tandem.kernels.paged_decode.triton import paged_decode_triton

        return paged_decode_triton(q, layer_view, block_table, context_lens, spec)
    if uses_native(q.device, backend) and is_native(q, layer_view, spec):
        return _decode_by_code(q, layer_view, block_table, context_lens, spec)
    return paged_decode_reference(q, layer_view, block_table, context_lens, spec)


def is_native(q: Tensor, layer_view: Tensor, spec: AttentionSpec) -> bool:
    """True if the C code is available and has this case: no window, no soft cap, float32 or bfloat16."""
    is_plain = spec.window is None and spec.softcap is None
    has_types = q.dtype in DTYPES and layer_view.dtype in DTYPES
    return is_plain and has_types and q.shape[2] in _WIDTHS and LIBRARY.is_available()


def _decode_by_code(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """For cases that are native. Runs on as many threads as torch does."""
    batch, q_heads, width = q.shape
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    context_lens = context_lens.contiguous()
    num_blocks, _, kv_heads, block_tokens, _ = layer_view.shape
    number_bytes = layer_view.element_size()
    out = torch.empty((batch, q_heads, width), dtype=q.dtype)
    blocks, planes, heads = layer_view.stride()[:3]
    answer = LIBRARY.call((
        q.data_ptr(), layer_view.data_ptr(), out.data_ptr(), block_table.data_ptr(), context_lens.data_ptr(),
        0 if spec.sinks is None else spec.sinks.data_ptr(),
        batch, kv_heads, q_heads // kv_heads, width, block_tokens, num_blocks, block_table.shape[1],
        q.stride(0), block_table.stride(0), blocks * number_bytes, planes * number_bytes, heads * number_bytes,
        q.dtype is torch.bfloat16, layer_view.dtype is torch.bfloat16, torch.get_num_threads(),
    ), spec.scale)  # fmt: skip
    if answer == _OUTSIDE:
        raise IndexError("block_table or context_lens name blocks that the pool or the table does not have")
    if answer == _NO_MEMORY:
        raise MemoryError("no memory for the parts of paged decode")
    return out
