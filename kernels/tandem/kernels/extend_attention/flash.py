"""extend_attention by torch's own flash kernel for the CPU, for chunks of some length without window and soft cap.

Keys and values of a sequence are gathered whole; the kernel never holds the scores. In bfloat16 it copies them for
every query head into the order that matrix instructions want: heads are asked for in parts where these are large.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.dtypes import product_dtype
from tandem.kernels.layer_view import gather_tokens

_DTYPES = (torch.float32, torch.bfloat16)
_FEWEST_ROWS = 4
"""Queries of a sequence, on average: down to so few it was measured, and took half to a seventh of the time."""

REORDERED_BYTES = 32 << 20
"""Most that those copies take in a part, unless those of one query head a KV head are more."""


def takes(q: Tensor, block_table: Tensor, spec: AttentionSpec) -> bool:
    """True if this is the faster way on a CPU; it gives the reference's numbers, summed in another order."""
    is_plain = spec.window is None and spec.softcap is None
    return is_plain and q.dtype in _DTYPES and q.shape[0] >= _FEWEST_ROWS * block_table.shape[0]


def extend_attention_flash(
    q: Tensor, layer_view: Tensor, cu_seqlens: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `extend_attention`; for cases that `takes` accepts."""
    out, wide = torch.empty(q.shape, dtype=q.dtype), product_dtype(q.dtype, q.device)
    starts: list[int] = cu_seqlens.tolist()
    kv_heads, block_tokens, width = layer_view.shape[2:]
    for sequence, length in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        tokens = rows.stop - rows.start
        if tokens == 0:
            continue
        if length < tokens:
            raise ValueError(f"sequence {sequence}: {tokens} queries, context of {length} tokens")
        blocks = block_table[sequence : sequence + 1, : -(-length // block_tokens)]
        k, v = (plane[:, None, :length] for plane in gather_tokens(layer_view, blocks, wide))
        packed = (
            q[rows].to(wide).reshape(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)
        )  # [kv_heads, group, tokens, width]
        seen = None if tokens == length else torch.ones(tokens, length, dtype=torch.bool).tril_(length - tokens)
        sinks = None if spec.sinks is None else spec.sinks.view(kv_heads, -1, 1)
        result = out[rows].view(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)
        for part in _parts(packed.shape[1], k):
            of_part = None if sinks is None else sinks[:, part]
            result[:, part].copy_(_attend(packed[:, part], k, v, seen, of_part, spec.scale))
    return out


def _parts(group: int, k: Tensor) -> Iterator[slice]:
    """Parts of a KV head's `group` query heads to compute at once; k: [kv_heads, 1, tokens, width]."""
    most = group if k.dtype is not torch.bfloat16 else max(1, REORDERED_BYTES // (2 * k.numel() * k.element_size()))
    return (slice(low, min(low + most, group)) for low in range(0, group, most))


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor | None, scale: float) -> Tensor:
    """q [kv_heads, heads, tokens, width] over keys and values that its heads share."""
    shared = (-1, q.shape[1], -1, -1)
    k, v = k.expand(shared), v.expand(shared)
    if sinks is not None:
        return _with_sinks(q, k, v, seen, sinks, scale)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scale)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """The same kernel, which also returns the logarithm of each row's denominator: a sink makes that larger."""
    mask = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    answer, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, seen is None, attn_mask=mask, scale=scale
    )
    weighted: Tensor = answer.float().mul_(torch.sigmoid(log_sum - sinks)[..., None])
    return weighted
