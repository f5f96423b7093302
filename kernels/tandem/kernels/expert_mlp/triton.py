"""expert_mlp for the GPU: four launches, whatever the router chose. Not yet timed on a device.

    pairs    (token, choice), numbered token · per_token + choice
    sorted   pairs by expert, those of an expert in rising order:  | expert 0 | expert 1 |     | expert 3 | …
    tiles    of ROWS sorted pairs of one expert, the last of each in part empty

The number of tiles is known on the device alone, so the grid has the possible maximum: programs of the last ones find
no expert and end. A program finds its expert by adding up the tiles of those before it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.expert_mlp.weights import CLAMPED, GELU_TANH, SILU, ExpertWeights
from tandem.kernels.triton_tiles import GATE_TILE, GATE_WARPS, SORT_TILE, expert_row_tiles, expert_tile

_KINDS = {SILU: 0, GELU_TANH: 1, CLAMPED: 2}


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(chosen_ptr, order_ptr, starts_ptr, pairs, COUNT: tl.constexpr, TILE: tl.constexpr):
    """One program an expert: sort its pairs, and store where they begin. Stable, and the same in every run."""
    expert = tl.program_id(0)
    below = tl.zeros([TILE], tl.int32)
    for first in range(0, pairs, TILE):
        places = first + tl.arange(0, TILE)
        chosen = tl.load(chosen_ptr + places, mask=places < pairs, other=COUNT)
        below += (chosen < expert).to(tl.int32)
    start = tl.sum(below, 0)
    tl.store(starts_ptr + expert, start)
    if expert == COUNT - 1:
        tl.store(starts_ptr + COUNT, pairs)
    for first in range(0, pairs, TILE):
        places = first + tl.arange(0, TILE)
        chosen = tl.load(chosen_ptr + places, mask=places < pairs, other=COUNT)
        is_mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(is_mine, 0) - 1, places, mask=is_mine > 0)
        start += tl.sum(is_mine, 0)


@triton.jit
def _find_tile(starts_ptr, tile, ROWS: tl.constexpr, COUNT: tl.constexpr, PADDED_COUNT: tl.constexpr):
    """(expert, first sorted pair, behind its last one) of a tile; the expert is COUNT where there is no such tile."""
    numbers = tl.arange(0, PADDED_COUNT)
    begins = tl.load(starts_ptr + numbers, mask=numbers < COUNT, other=0)
    ends = tl.load(starts_ptr + numbers + 1, mask=numbers < COUNT, other=0)
    tiles = tl.cdiv(ends - begins, ROWS)
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (numbers < COUNT)).to(tl.int32), 0)
    before = tl.sum(tl.where(numbers < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(numbers == expert, begins, 0), 0)
    end = tl.sum(tl.where(numbers == expert, ends, 0), 0)
    return expert, begin + (tile - before) * ROWS, end


@triton.jit
def _sigmoid(x):
    shrunk = tl.exp(-tl.abs(x))  # of a falling exponent: exp(-x) would overflow
    return tl.where(x >= 0, 1.0, shrunk) / (1.0 + shrunk)


@triton.jit
def _activate(gate, up, alpha, limit, KIND: tl.constexpr):
    """fp32 gate and up to the input of down, by `_KINDS`."""
    if KIND == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return up * gate * _sigmoid(alpha * gate)
    if KIND == 1:
        return gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up  # 2 sqrt(2 / pi)
    return gate * _sigmoid(gate) * up


@triton.jit
def _gate_up_kernel(
    x_ptr,
    gate_up_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    x_stride,
    alpha,
    limit,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of pairs and of features: both products of the features, and the activation of the two."""
    expert, first, end = _find_tile(starts_ptr, tl.program_id(1), ROWS, COUNT, PADDED_COUNT)
    if expert >= COUNT:
        return
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    tokens = tl.load(order_ptr + rows, mask=is_row, other=0) // PER_TOKEN
    features = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_feature = features < FEATURES
    gate_rows = expert.to(tl.int64) * (2 * FEATURES) + tl.where(is_feature, features, 0)
    depths = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + depths[None, :]
    gate_ptrs = gate_up_ptr + gate_rows[None, :] * HIDDEN + depths[:, None]
    up_ptrs = gate_ptrs + FEATURES * HIDDEN
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            x = tl.load(x_ptrs + start)
            gate_weight = tl.load(gate_ptrs + start)
            up_weight = tl.load(up_ptrs + start)
        else:
            is_left = depths < HIDDEN - start
            x = tl.load(x_ptrs + start, mask=is_left[None, :], other=0.0)
            gate_weight = tl.load(gate_ptrs + start, mask=is_left[:, None], other=0.0)
            up_weight = tl.load(up_ptrs + start, mask=is_left[:, None], other=0.0)
        gate = tl.dot(x, gate_weight, gate, input_precision=PRECISION)
        up = tl.dot(x, up_weight, up, input_precision=PRECISION)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + gate_rows).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + gate_rows + FEATURES).to(tl.float32)[None, :]
    activated = _activate(gate, up, alpha, limit, KIND).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * FEATURES + features[None, :]
    tl.store(out_ptrs, activated, mask=is_row[:, None] & is_feature[None, :])


@triton.jit
def _down_kernel(
    activated_ptr,
    down_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    HIDDEN: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of pairs and of hidden numbers: the answers, which go to where their pairs stand unsorted."""
    expert, first, end = _find_tile(starts_ptr, tl.program_id(1), ROWS, COUNT, PADDED_COUNT)
    if expert >= COUNT:
        return
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    numbers = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_number = numbers < HIDDEN
    down_rows = expert.to(tl.int64) * HIDDEN + tl.where(is_number, numbers, 0)
    depths = tl.arange(0, DEPTH)
    row_ptrs = activated_ptr + tl.where(is_row, rows, first).to(tl.int64)[:, None] * FEATURES + depths[None, :]
    down_ptrs = down_ptr + down_rows[None, :] * FEATURES + depths[:, None]
    answers = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, FEATURES, DEPTH):
        if FEATURES % DEPTH == 0:
            activated = tl.load(row_ptrs + start)
            weight = tl.load(down_ptrs + start)
        else:
            is_left = depths < FEATURES - start
            activated = tl.load(row_ptrs + start, mask=is_left[None, :], other=0.0)
            weight = tl.load(down_ptrs + start, mask=is_left[:, None], other=0.0)
        answers = tl.dot(activated, weight, answers, input_precision=PRECISION)
    if HAS_BIAS:
        answers += tl.load(bias_ptr + down_rows).to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + rows, mask=is_row, other=0).to(tl.int64)
    out_ptrs = out_ptr + pairs[:, None] * HIDDEN + numbers[None, :]
    tl.store(out_ptrs, answers.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_number[None, :])


@triton.jit
def _sum_kernel(
    answers_ptr, shares_ptr, out_ptr, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A token's answers by its shares, in the order in which it chose."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = numbers < HIDDEN
    total = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + choice
        answer = tl.load(answers_ptr + pair * HIDDEN + numbers, mask=mask, other=0.0).to(tl.float32)
        total += answer * tl.load(shares_ptr + pair)
    tl.store(out_ptr + token * HIDDEN + numbers, total.to(out_ptr.dtype.element_ty), mask=mask)


def expert_mlp_triton(x: Tensor, chosen: Tensor, shares: Tensor, experts: ExpertWeights) -> Tensor:
    """See `expert_mlp`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    chosen, shares = chosen.contiguous(), shares.contiguous()
    (tokens, per_token), count = chosen.shape, experts.count
    pairs, hidden, features = tokens * per_token, experts.hidden, experts.features
    cut = expert_tile(pairs, count, x.element_size())
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(count + 1, dtype=torch.int32, device=x.device)
    _sort_kernel[(count,)](chosen, order, starts, pairs, COUNT=count, TILE=SORT_TILE, num_warps=4)
    row_tiles, padded = expert_row_tiles(pairs, count, cut.rows), triton.next_power_of_2(count)
    activated = torch.empty((pairs, features), dtype=x.dtype, device=x.device)
    bias = experts.gate_up_bias
    _gate_up_kernel[(triton.cdiv(features, cut.columns), row_tiles)](
        x, experts.gate_up, experts.gate_up if bias is None else bias, order, starts, activated, x.stride(0),
        experts.gate.alpha, experts.gate.limit, COUNT=count, PADDED_COUNT=padded, PER_TOKEN=per_token, HIDDEN=hidden,
        FEATURES=features, ROWS=cut.rows, COLUMNS=cut.columns, DEPTH=cut.depth, KIND=_KINDS[experts.gate.kind],
        HAS_BIAS=bias is not None, PRECISION="ieee", num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    answers = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    bias, columns = experts.down_bias, 2 * cut.columns  # as many numbers of weights as gate and up have
    _down_kernel[(triton.cdiv(hidden, columns), row_tiles)](
        activated, experts.down, experts.down if bias is None else bias, order, starts, answers, COUNT=count,
        PADDED_COUNT=padded, HIDDEN=hidden, FEATURES=features, ROWS=cut.rows, COLUMNS=columns, DEPTH=cut.depth,
        HAS_BIAS=bias is not None, PRECISION="ieee", num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    _sum_kernel[(tokens, triton.cdiv(hidden, GATE_TILE))](
        answers, shares, out, HIDDEN=hidden, PER_TOKEN=per_token, TILE=GATE_TILE, num_warps=GATE_WARPS
    )
    return out
