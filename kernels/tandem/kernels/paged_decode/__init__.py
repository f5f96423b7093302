"""Decode attention: one query token a sequence over its paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.layer_view import check_attention_arguments
from tandem.kernels.packed_attention import AttentionSpec
from tandem.kernels.paged_decode import binding
from tandem.kernels.paged_decode.reference import paged_decode_reference

__all__ = ["paged_decode"]


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
    if uses_native(q.device, backend) and binding.takes(q, layer_view, spec):
        return binding.paged_decode_native(q, layer_view, block_table, context_lens, spec)
    return paged_decode_reference(q, layer_view, block_table, context_lens, spec)
