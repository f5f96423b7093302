"""paged_attention_deterministic in torch.

    query group   QUERY_TILE neighbouring tokens of one sequence, padded with zeros
    key tile      KEY_TILE tokens from position 0 of the sequence

Every product is [QUERY_TILE x GQA group, width] x [width, KEY_TILE] or its counterpart for the values, whatever the
call holds; groups of all sequences only share a batched product. A token folds tiles into (maximum, sum, accumulator)
in order of position, and a tile in which it sees nothing leaves the three bitwise as they were (online softmax: Milakov
and Gimelshein 2018, algorithm 3). Hence its result depends on its query and the keys and values it sees, alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.attention_reference import AttentionSpec
from tandem.kernels.layer_view import gather_tokens

QUERY_TILE = 8
KEY_TILE = 128
_GATHERED_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _QueryGroup:
    """Rows `row : row + count` of the call are tokens at `position ...` of `sequence`."""

    sequence: int
    row: int
    count: int
    position: int

    @property
    def tiles(self) -> int:
        return (self.position + self.count - 1) // KEY_TILE + 1


@dataclass(slots=True)
class _Softmax:
    """The state of the online softmax: `[groups, kv_heads, QUERY_TILE, GQA group, 1 or width]`."""

    maximum: Tensor
    total: Tensor
    accumulated: Tensor


def paged_attention_deterministic_reference(
    q: Tensor,
    layer_view: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """See `paged_attention_deterministic`."""
    dtype, q = q.dtype, q.float()  # no library promises the same sums for bfloat16 in batches of another size
    out = torch.zeros_like(q)
    lens: list[int] = context_lens.tolist()
    groups = sorted(_query_groups(cu_seqlens.tolist(), lens), key=lambda group: -group.tiles)
    group_bytes = 2 * layer_view.shape[2] * layer_view.shape[4] * KEY_TILE * q.element_size()
    most = max(1, _GATHERED_BYTES // group_bytes)
    for low in range(0, len(groups), most):
        _attend_groups(q, out, layer_view, block_table, lens, groups[low : low + most], spec)
    return out.to(dtype)


def _query_groups(starts: list[int], lens: list[int]) -> list[_QueryGroup]:
    groups = []
    for sequence, length in enumerate(lens):
        begin, end = starts[sequence], starts[sequence + 1]
        if length == 0:
            continue
        if length < end - begin:
            raise ValueError(f"sequence {sequence}: {end - begin} queries, context of {length} tokens")
        for row in range(begin, end, QUERY_TILE):
            groups.append(_QueryGroup(sequence, row, min(QUERY_TILE, end - row), length - (end - row)))
    return groups


def _attend_groups(
    q: Tensor,
    out: Tensor,
    layer_view: Tensor,
    block_table: Tensor,
    lens: list[int],
    groups: list[_QueryGroup],
    spec: AttentionSpec,
) -> None:
    """Attend for query groups, those with most tiles first, and write into `out`."""
    device, kv_heads, block_tokens = q.device, layer_view.shape[2], layer_view.shape[3]
    q_heads, width = q.shape[1:]
    offsets = torch.arange(QUERY_TILE, device=device)
    real = offsets < torch.tensor([group.count for group in groups], device=device)[:, None]
    rows = torch.cat([torch.arange(group.row, group.row + group.count, device=device) for group in groups])
    firsts = torch.tensor([group.position for group in groups], device=device)[:, None]
    positions = torch.where(real, firsts + offsets, -1)
    padded = q.new_zeros((len(groups), QUERY_TILE, q_heads, width))
    padded[real] = q[rows]
    packed = padded.view(len(groups), QUERY_TILE, kv_heads, -1, width).transpose(1, 2).contiguous()
    state = _Softmax(
        maximum=packed.new_full((*packed.shape[:-1], 1), float("-inf"), dtype=torch.float32),
        total=packed.new_zeros((*packed.shape[:-1], 1), dtype=torch.float32),
        accumulated=torch.zeros_like(packed, dtype=torch.float32),
    )
    if spec.sinks is not None:  # as if a tile with that score and a value of zero had come first
        state.maximum[:] = spec.sinks.view(kv_heads, 1, -1, 1)
        state.total.fill_(1.0)
    begins = [max(0, group.position - spec.window + 1) if spec.window else 0 for group in groups]
    ends = [group.position + group.count for group in groups]
    begins_column, ends_column = (torch.tensor(x, device=device)[:, None] for x in (begins, ends))
    tables = block_table[torch.tensor([group.sequence for group in groups], device=device)].long()
    for tile in range(min(begins) // KEY_TILE, groups[0].tiles):
        low, high = tile * KEY_TILE, (tile + 1) * KEY_TILE
        active = sum(group.tiles > tile for group in groups)
        if min(group.position for group in groups[:active]) + 1 >= high and (
            spec.window is None or low > max(ends[:active]) - 1 - spec.window
        ):
            k, v = gather_tokens(layer_view, tables[:active, low // block_tokens : high // block_tokens], q.dtype)
            _fold_tile(state, active, packed[:active], k, v, None, spec)
            continue
        tokens = torch.arange(low, high, device=device)
        edges = begins_column[:active], ends_column[:active]
        k, v = _gather_edge(layer_view, tables[:active], tokens, *edges, q.dtype)
        column = positions[:active, :, None]
        visible = tokens <= column
        if spec.window is not None:
            visible &= tokens > column - spec.window
        _fold_tile(state, active, packed[:active], k, v, visible[:, None, :, None], spec)
    results = (state.accumulated / state.total + 0.0).to(q.dtype)  # + 0.0: what is hidden decides the sign of a zero
    out[rows] = results.transpose(1, 2).reshape(len(groups), QUERY_TILE, q_heads, width)[real]


def _gather_edge(
    layer_view: Tensor, tables: Tensor, tokens: Tensor, begins: Tensor, ends: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A tile that some group sees in part; tokens outside a group's `begins ... ends` get values of zero, any key."""
    block_tokens, width = layer_view.shape[3:]
    blocks = tokens[::block_tokens] // block_tokens
    wanted = torch.clamp(blocks[None], begins // block_tokens, (ends - 1) // block_tokens)
    k, v = gather_tokens(layer_view, tables.gather(1, wanted), dtype)
    unread = (tokens < begins) | (tokens >= ends)
    v.view(tables.shape[0], -1, KEY_TILE, width).masked_fill_(unread[:, None, :, None], 0)
    return k, v


def _fold_tile(
    state: _Softmax, active: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: AttentionSpec
) -> None:
    """Fold a key tile into the state of the first `active` groups.

    visible: `[active, 1, QUERY_TILE, 1, KEY_TILE]`, or None where every token sees the whole tile: the same arithmetic
    without the masks, so the same bits. Padding rows then collect numbers that are never read.
    """
    batch = k.shape[0]
    scores = torch.bmm(q.reshape(batch, -1, q.shape[-1]), k.transpose(1, 2)).float().mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    scores = scores.view(*q.shape[:-1], KEY_TILE)
    if visible is not None:
        scores = scores.masked_fill_(~visible, float("-inf"))
    before, total, accumulated = state.maximum[:active], state.total[:active], state.accumulated[:active]
    maximum = torch.maximum(before, scores.amax(-1, keepdim=True))
    seen = None if visible is None else visible.any(-1, keepdim=True)
    finite = maximum if seen is None else torch.where(seen, maximum, 0.0)
    weights = scores.sub_(finite).exp_()
    kept = torch.exp(before - finite)
    new_total = total * kept + weights.sum(-1, keepdim=True)
    added = torch.bmm(weights.view(batch, -1, KEY_TILE).to(v.dtype), v).view(q.shape)
    new_accumulated = accumulated * kept + added
    state.total[:active] = new_total if seen is None else torch.where(seen, new_total, total)
    state.accumulated[:active] = new_accumulated if seen is None else torch.where(seen, new_accumulated, accumulated)
    state.maximum[:active] = maximum
