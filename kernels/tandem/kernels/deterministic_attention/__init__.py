"""Paged attention in which a token's result does not depend on the call's other tokens."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.deterministic_attention.reference import KEY_TILE, paged_attention_deterministic_reference
from tandem.kernels.layer_view import check_attention_arguments, check_cu_seqlens

__all__ = ["KEY_TILE", "paged_attention_deterministic"]


def paged_attention_deterministic(
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
) -> Tensor:
    """`extend_attention`, bitwise the same for a token whatever the batch, the chunking and the block size.

    Arguments, result and errors as in `extend_attention`; a decode step passes one query a sequence
    (`cu_seqlens = arange(batch + 1)`), a context of 0 gives zeros. `block_tokens` must divide `KEY_TILE`. Computed in
    fp32 whatever the dtypes, rounded once. The promise is tested on CPU, with one to three threads and widths that 16
    divides; the rest computes without promise.
    """
    check_attention_arguments(q, layer_view, block_table, context_lens)
    check_cu_seqlens(cu_seqlens, block_table.shape[0])
    if KEY_TILE % layer_view.shape[3]:
        raise ValueError(f"block_tokens must divide {KEY_TILE}, got {layer_view.shape[3]}")
    spec = AttentionSpec(scale=scale, window=window, softcap=softcap, sinks=sinks)
    spec.check_sinks(q.shape[1])
    return paged_attention_deterministic_reference(q, layer_view, cu_seqlens, block_table, context_lens, spec)
