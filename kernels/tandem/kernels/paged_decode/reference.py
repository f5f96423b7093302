"""paged_decode in torch: the specification, and the CPU path for cases that `cpu.c` does not cover.

Sequences of similar length are padded to the longest and share one batched product, as many as the cache holds; a
sequence too long for it is taken in spans. Synchronises on an accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec, SpanMerger, attend_span
from tandem.kernels.layer_view import gather_tokens

_GATHERED_BYTES = 4 << 20
"""Keys and values gathered at a time: more than that leaves the cache, and the allocator returns it to the system."""
_BATCH_BYTES = 512 << 10
"""Keys and values that are read in the time that one more batch costs; less padding than that is not worth one."""


def paged_decode_reference(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `paged_decode`."""
    lens: list[int] = context_lens.tolist()
    token_bytes = 2 * layer_view.shape[2] * layer_view.shape[4] * layer_view.element_size()
    budget_tokens = max(_GATHERED_BYTES // token_bytes, layer_view.shape[3])
    groups = list(similar_lengths(lens, spec.window, budget_tokens, _BATCH_BYTES // token_bytes))
    if len(groups) == 1 and len(groups[0]) == len(lens):
        return _decode_batch(q, layer_view, block_table, lens, spec, budget_tokens)
    out = torch.zeros_like(q)
    for group in groups:
        index = torch.tensor(group, device=q.device)
        part = [lens[i] for i in group]
        out[index] = _decode_batch(q[index], layer_view, block_table[index], part, spec, budget_tokens)
    return out


def similar_lengths(lens: list[int], window: int | None, budget_tokens: int, batch_tokens: int) -> Iterator[list[int]]:
    """Split sequences into batches that are cheap when padded; empty sequences belong to none.

    A batch reads at most `budget_tokens` tokens, or holds one sequence. It ends early where padding all that could
    still join would read more than `batch_tokens` tokens for nothing. Yields lists of indices, in ascending order.
    """
    reads = [min(length, window or length) for length in lens]
    order = sorted((i for i, length in enumerate(lens) if length > 0), key=lambda i: -reads[i])
    group: list[int] = []
    for place, i in enumerate(order):
        if group:
            longest = reads[group[0]]
            joining = min(len(order) - place, budget_tokens // longest - len(group))
            if joining < 1 or (longest - reads[i]) * joining > batch_tokens:
                yield sorted(group)
                group = []
        group.append(i)
    if group:
        yield sorted(group)


def _decode_batch(
    q: Tensor, layer_view: Tensor, block_table: Tensor, lens: list[int], spec: AttentionSpec, budget_tokens: int
) -> Tensor:
    """Attend for sequences that are read together; every length is positive."""
    batch, q_heads, width = q.shape
    kv_heads, block_tokens = layer_view.shape[2], layer_view.shape[3]
    packed = q.reshape(batch * kv_heads, q_heads // kv_heads, width)
    first = [max(0, length - spec.window) // block_tokens if spec.window else 0 for length in lens]
    sinks = spec.sinks_of_rows(kv_heads, sequences=batch)
    if batch > 1 and (len(set(lens)) > 1):
        k, v, hidden = _gather_ragged(layer_view, block_table, lens, first, spec, q.dtype)
        return attend_span(packed, k, v, hidden, spec, sinks)[1].view(batch, q_heads, width).to(q.dtype)
    length, begin = lens[0], first[0]
    span_blocks = max(1, budget_tokens // (batch * block_tokens))
    end = -(-length // block_tokens)
    merger = SpanMerger()
    for low in range(begin, end, span_blocks):
        high = min(low + span_blocks, end)
        k, v = gather_tokens(layer_view, block_table[:, low:high], q.dtype)
        skipped = max(0, length - spec.window - low * block_tokens) if spec.window and low == begin else 0
        visible = slice(skipped, length - low * block_tokens)
        scores, out = attend_span(packed, k[:, visible], v[:, visible], None, spec, sinks if low == begin else None)
        if high - low == end - begin:
            return out.view(batch, q_heads, width).to(q.dtype)
        merger.add(scores, out)
    return merger.output().view(batch, q_heads, width).to(q.dtype)


def _gather_ragged(
    layer_view: Tensor, block_table: Tensor, lens: list[int], first: list[int], spec: AttentionSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather blocks of sequences of different lengths, with a mask of tokens to hide. Each begins at its own first
    block.

    Values of hidden tokens must be numbers: unwritten memory may hold NaN, and 0 * NaN is NaN. Hence blocks past
    a sequence's end are replaced by one that is known to be full, and the rest of its last block becomes zero.
    """
    batch, heads, block_tokens = len(lens), layer_view.shape[2], layer_view.shape[3]
    device = layer_view.device
    ends = torch.tensor(lens, device=device)[:, None]
    begins = torch.tensor(first, device=device)[:, None]
    last = (ends - 1) // block_tokens
    longest = max(range(batch), key=lambda i: -(-lens[i] // block_tokens) - first[i])
    blocks = -(-lens[longest] // block_tokens) - first[longest]
    wanted = begins + torch.arange(blocks, device=device)
    ids = block_table.gather(1, torch.minimum(wanted, last))
    k, v = gather_tokens(layer_view, torch.where(wanted <= last, ids, block_table[longest, first[longest]]), dtype)
    tails = v.view(batch, heads, blocks, block_tokens, -1)
    index = (torch.arange(batch, device=device), slice(None), (last - begins).view(-1))
    unwritten = last * block_tokens + torch.arange(block_tokens, device=device) >= ends
    tails[index] = tails[index].masked_fill_(unwritten[:, None, :, None], 0)
    tokens = begins * block_tokens + torch.arange(blocks * block_tokens, device=device)
    hidden = tokens >= ends
    if spec.window is not None:
        hidden |= tokens < ends - spec.window
    return k, v, hidden[:, None].expand(batch, heads, -1).reshape(batch * heads, 1, -1)
