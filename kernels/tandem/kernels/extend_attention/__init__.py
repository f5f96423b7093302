"""Prefill attention: a chunk of query tokens of each sequence over its paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.extend_attention import binding, flash
from tandem.kernels.extend_attention.reference import extend_attention_reference
from tandem.kernels.layer_view import check_attention_arguments, check_cu_seqlens
from tandem.kernels.packed_attention import AttentionSpec

__all__ = ["extend_attention"]


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
        if binding.takes(q, layer_view):
            return binding.extend_attention_native(q, layer_view, cu_seqlens, block_table, context_lens, spec)
        if flash.takes(q, block_table, spec):
            return flash.extend_attention_flash(q, layer_view, cu_seqlens, block_table, context_lens, spec)
    return extend_attention_reference(q, layer_view, cu_seqlens, block_table, context_lens, spec)
