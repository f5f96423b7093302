"""extend_attention by torch's own flash kernel for the CPU, for chunks of some length without window and soft cap.

Keys and values of a sequence are gathered whole; the kernel never holds the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.layer_view import gather_tokens
from tandem.kernels.packed_attention import AttentionSpec

_DTYPES = (torch.float32, torch.bfloat16)
_FEWEST_ROWS = 4
"""Queries of a sequence, on average: down to so few it was measured, and took half to a seventh of the time."""


def takes(q: Tensor, block_table: Tensor, spec: AttentionSpec) -> bool:
    """Whether this is the better way on a CPU; it gives the reference's numbers, summed up in another order."""
    is_plain = spec.window is None and spec.softcap is None
    return is_plain and q.dtype in _DTYPES and q.shape[0] >= _FEWEST_ROWS * block_table.shape[0]


def extend_attention_flash(
    q: Tensor, layer_view: Tensor, cu_seqlens: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `extend_attention`; for what `takes` says yes to."""
    out = torch.empty(q.shape, dtype=q.dtype)
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
        k, v = (plane[:, None, :length] for plane in gather_tokens(layer_view, blocks, q.dtype))
        packed = q[rows].reshape(tokens, kv_heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, tokens, width]
        shared = (-1, packed.shape[1], -1, -1)
        is_whole = tokens == length
        seen = None if is_whole else torch.ones(tokens, length, dtype=torch.bool).tril_(length - tokens)
        k, v = k.expand(shared), v.expand(shared)
        if spec.sinks is not None:
            answer = _with_sinks(packed, k, v, seen, spec.sinks.view(kv_heads, -1, 1), spec.scale)
        else:
            answer = functional.scaled_dot_product_attention(
                packed, k, v, attn_mask=seen, is_causal=is_whole, scale=spec.scale
            )
        out[rows].view(tokens, kv_heads, -1, width).permute(1, 2, 0, 3).copy_(answer)
    return out


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """The same kernel, which also says the logarithm of each row's denominator: a sink makes that larger."""
    mask = None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    answer, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, seen is None, attn_mask=mask, scale=scale
    )
    weighted: Tensor = answer.float().mul_(torch.sigmoid(log_sum - sinks)[..., None])
    return weighted
