"""extend_attention in torch: the specification, and the CPU path for short chunks, windows and soft caps.

Per sequence, spans of keys outside (gathered once each), tiles of queries inside, both small enough for the cache; a
tile touches only keys that one of its queries may see. Synchronises on an accelerator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec, SpanMerger, attend_span
from tandem.kernels.layer_view import gather_tokens

_GATHERED_BYTES = 4 << 20
_SCORE_BYTES = 1 << 20
_TILE_TOKENS = (16, 256)


def extend_attention_reference(
    q: Tensor,
    layer_view: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """See `extend_attention`."""
    out = torch.empty_like(q)
    starts: list[int] = cu_seqlens.tolist()
    for sequence, length in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.stop > rows.start:
            if length < rows.stop - rows.start:
                raise ValueError(f"sequence {sequence}: {rows.stop - rows.start} queries, context of {length} tokens")
            _extend_sequence(q[rows], out[rows], layer_view, block_table[sequence], length, spec)
    return out


def _extend_sequence(
    q: Tensor, out: Tensor, layer_view: Tensor, table_row: Tensor, length: int, spec: AttentionSpec
) -> None:
    """Attend for one sequence and write into `out`."""
    tokens, q_heads, width = q.shape
    kv_heads, block_tokens = layer_view.shape[2], layer_view.shape[3]
    group = q_heads // kv_heads
    packed = q.reshape(tokens, kv_heads, group, width).transpose(0, 1).reshape(kv_heads, tokens * group, width)
    results = out.view(tokens, kv_heads, group, width).transpose(0, 1)
    past = length - tokens
    lowest = max(0, past - spec.window + 1) if spec.window else 0
    token_bytes = 2 * kv_heads * width * layer_view.element_size()
    span_tokens = max(_GATHERED_BYTES // token_bytes // block_tokens, 1) * block_tokens
    begin = lowest // block_tokens * block_tokens
    tile_tokens = _tile_tokens(q_heads, min(span_tokens, length - begin))
    tiles = range(0, tokens, tile_tokens)
    mergers = {tile: SpanMerger() for tile in tiles}
    for low in range(begin, length, span_tokens):
        high = min(low + span_tokens, length)
        k, v = gather_tokens(layer_view, table_row[None, low // block_tokens : -(-high // block_tokens)], q.dtype)
        for tile in tiles:
            first, last = past + tile, past + min(tile + tile_tokens, tokens) - 1
            seen_from = max(low, first - spec.window + 1) if spec.window else low
            seen_to = min(high, last + 1)
            if seen_from >= seen_to:
                continue
            keys = slice(seen_from - low, seen_to - low)
            hidden = _hidden(first, last, seen_from, seen_to, group, spec, q.device)
            rows = slice(tile * group, (last + 1 - past) * group)
            sinks = spec.sinks_of_rows(kv_heads, tokens=last + 1 - first) if mergers[tile].is_empty else None
            scores, part = attend_span(packed[:, rows], k[:, keys], v[:, keys], hidden, spec, sinks)
            if length - begin > span_tokens:
                mergers[tile].add(scores, part)
                part = mergers[tile].output()
            results[:, tile : last + 1 - past] = part.view(kv_heads, -1, group, width)


def _tile_tokens(q_heads: int, span_tokens: int) -> int:
    fewest, most = _TILE_TOKENS
    return min(most, max(fewest, _SCORE_BYTES // (4 * q_heads * span_tokens)))


def _hidden(
    first: int, last: int, seen_from: int, seen_to: int, group: int, spec: AttentionSpec, device: torch.device
) -> Tensor | None:
    """Mask `[1, (last - first + 1) * group, seen_to - seen_from]` of the keys each query must not see, or None."""
    past_end = seen_to - 1 > first
    past_window = spec.window is not None and last - seen_from >= spec.window
    if not past_end and not past_window:
        return None
    queries = torch.arange(first, last + 1, device=device).repeat_interleave(group)[:, None]
    keys = torch.arange(seen_from, seen_to, device=device)
    hidden = keys > queries
    if spec.window is not None:
        hidden |= keys <= queries - spec.window
    return hidden[None]
