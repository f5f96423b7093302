"""A dense decoder layer's work on few rows, before and behind its attention: two calls instead of ten.

Torch's computation with the same parts is the specification (`rms_norm`, `PrepackedLinear`, `rotate`, `silu_mul`): the
numbers are rounded at the same places. For bfloat16 on a CPU with AVX2 or more; elsewhere `fuse` gives None.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.cpu_library import LANES, library_of
from tandem.kernels.prepacked_linear import PrepackedLinear
from tandem.kernels.quantized_linear import QuantizedLinear

LIBRARY = library_of("fused_layer")
MOST_ROWS, MOST_ROWS_VNNI, MOST_ROWS_AMX = 32, 64, 128
"""Most rows of a call; the second with quantised weights and VNNI, the third with a matrix unit. Quantised weights take
any number: threads share the quantising then."""
_MOST_NUMBERS = 1 << 16
"""Most numbers of a row, because threads keep copies on their stacks."""
_MOST_TOGETHER = 1 << 20
"""Most bytes of all rows of a call, quantised, without what AVX2 widens: a stack may have no more than 2 MiB."""
_Product = PrepackedLinear | QuantizedLinear
_NORM_OUT, _NORM_ROWS, _NORM_FIELDS = 3, 4, 8
"""Behind x, among the fields of `struct norm`; and how many those are."""
_PRODUCT_FIELDS = 23
"""Of `struct linear` in cpu.c: which kind it is, and as many as the larger kind has."""
_NUMBERS, _BLOCKS = 1 + 14, 1 + 20
"""Indices of the memory for quantised rows, and of that for unpacked weights, among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A layer of `width`: norms `[width]`, and products as callables, which need not be packed.

    qkv has the heads that turn first, `turning` of `head_dim`; gate_up has gate, then up.
    """

    input_norm: Tensor
    qkv: object
    o: object
    mlp_norm: Tensor
    gate_up: object
    down: object
    turning: int
    head_dim: int
    eps: float


def fuse(parts: LayerParts) -> DenseRow | None:
    """The layer for single rows; None where the C code has no part in one of its products, or not in its shape."""
    products = [parts.qkv, parts.o, parts.gate_up, parts.down]
    packed = [one for one in products if isinstance(one, _Product) and one.has_single_rows]
    if len(packed) < len(products) or not LIBRARY.serves():
        return None
    qkv, o, gate_up, down = packed
    is_whole = not (parts.input_norm.shape[0] % LANES or down.inner % LANES or parts.head_dim % (2 * LANES))
    is_chained = qkv.inner == o.columns == gate_up.inner == down.columns and gate_up.columns == 2 * down.inner
    is_small = max(qkv.inner, down.inner) <= _MOST_NUMBERS
    if not (is_whole and is_chained and is_small and parts.input_norm.dtype is torch.bfloat16):
        return None
    return DenseRow(parts, qkv, o, gate_up, down)


class DenseRow:
    """Made by `fuse`. Owns memory for intermediate results; one thread may use it, with as many as torch has at work.

    Calls take up to `most_rows` rows. Of `few_rows` each thread quantises all on its stack, of `stack_rows` as well
    where it also has memory to unpack weights in.
    """

    def __init__(self, parts: LayerParts, qkv: _Product, o: _Product, gate_up: _Product, down: _Product) -> None:
        self._kept = (parts, qkv, o, gate_up, down)
        widest = max(product.inner for product in (qkv, o, gate_up, down))
        products = [one for one in (qkv, o, gate_up, down) if isinstance(one, QuantizedLinear)]
        together = min([_MOST_TOGETHER // widest, *(one.rows_within(_MOST_TOGETHER) for one in products)])
        is_quantised = len(products) == 4
        self.stack_rows = min(_most_rows(is_quantised=is_quantised), max(1, together))
        self.few_rows = min([self.stack_rows, *(one.few_rows for one in products)])
        takes_all = is_quantised and products[2].has_strips
        self.most_rows = sys.maxsize if takes_all else self.few_rows
        self._room = max(one.scratch_bytes(1) for one in products) if takes_all else 0
        self._widened = [one for one in products if takes_all and one.widens(sys.maxsize)]
        self.blocks_bytes = max((one.blocks_bytes(1) for one in products), default=0)
        self.columns, self.eps, self.turning, self.head_dim = qkv.columns, parts.eps, parts.turning, parts.head_dim
        self.width, self.inner, self.mixed_width = qkv.inner, down.inner, o.inner
        width, first, second = qkv.inner, parts.input_norm.data_ptr(), parts.mlp_norm.data_ptr()
        self._mixed = torch.empty((o.columns,), dtype=torch.bfloat16)
        self._gates = torch.empty((gate_up.columns,), dtype=torch.bfloat16)
        self._added = torch.empty((down.columns,), dtype=torch.bfloat16)
        gates_width = gate_up.columns if self._widened else down.inner
        self._between = [(o.columns, gate_up.columns, down.columns), (o.columns, gates_width)]  # of few rows, of many
        norm = (0, 0, first, 0, 1, width, 1, 1)
        turn = (0, 0, 0, 1, parts.turning, parts.head_dim, qkv.columns, 0, 1, 1)
        product = _fields(qkv, 0)
        self._before = array("q", (0, *norm, *product, *turn, 1))
        self._rows_before = array("q", (3, *norm, *product, *turn, 1))
        self._many_before = array("q", (5, *norm, *_fields(qkv, 0, unpacks=True), *turn, 1))
        self._x, self._out = 1, 1 + len(norm) + 1 + qkv.OUT
        self._turn = 1 + len(norm) + len(product)
        gates = (0, 0, 1, down.inner, down.inner, 1, 1)
        outs = ((o, self._mixed), (gate_up, self._gates), (down, self._added))
        each = {flag: [_fields(one, out.data_ptr(), unpacks=flag) for one, out in outs] for flag in (False, True)}
        few, more = (
            (0, o.inner, *first_out, 0, 0, second, 0, 1, width, 1, 1, *second_out, *gates, *third_out, 1)
            for first_out, second_out, third_out in each.values()
        )
        self._behind, self._rows_behind = array("q", (1, *few)), array("q", (4, *few))
        self._many_behind = array("q", (6, *more))
        self._behind_x = 3 + _PRODUCT_FIELDS
        gate_up_at = self._behind_x + len(norm)
        down_at = gate_up_at + _PRODUCT_FIELDS + len(gates)
        self._outs = 3 + 1 + o.OUT, gate_up_at + 1 + gate_up.OUT, down_at + 1 + down.OUT

    def addresses(self, *, are_many: bool = False) -> tuple[int, int]:
        """Of `struct pre_attention` and `struct post_attention`, for few rows or many."""
        parts = (self._many_before, self._many_behind) if are_many else (self._before, self._behind)
        return parts[0].buffer_info()[0] + 8, parts[1].buffer_info()[0] + 8

    @property
    def takes_any(self) -> bool:
        """True if calls take any number of rows."""
        return self.most_rows == sys.maxsize

    @property
    def gates_width(self) -> int:
        """Numbers of a row of gates, where there are many."""
        return self._between[True][1]

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x `[rows, width]`, not changed, to qkv `[rows, columns]` with its heads turned; cos, sin `[rows, head_dim]`.

        All contiguous in their rows and x as a whole, cos and sin of one stride; from 1 to `most_rows` of them.
        """
        rows, turn, threads = x.shape[0], self._turn, torch.get_num_threads()
        out = torch.empty((rows, self.columns), dtype=torch.bfloat16)
        given = self._before if rows == 1 else self._rows_before if rows <= self.few_rows else self._many_before
        given[self._x] = x.data_ptr()
        given[self._out] = given[turn] = out.data_ptr()
        given[turn + 1], given[turn + 2] = cos.data_ptr(), sin.data_ptr()
        given[-1] = threads
        if rows > 1:
            _check_rows(rows, self.most_rows)
            normed = torch.empty((rows, self.width), dtype=torch.bfloat16)
            given[self._x + _NORM_OUT], given[self._x + _NORM_ROWS] = normed.data_ptr(), rows
            given[turn + 3], given[turn + 7] = rows, cos.stride(0)
            if rows > self.few_rows:
                _kept, *addresses = self.many_room(rows, threads)  # kept until the call is over
                _use(addresses, given, self._x + _NORM_FIELDS)
        LIBRARY.call_with(given, self.eps)
        return out

    def behind(self, x: Tensor, mixed: Tensor) -> Tensor:
        """x `[rows, width]`, contiguous, after the layer, written over; `mixed` has what attention answered."""
        if not mixed.is_contiguous():
            mixed = mixed.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        given = self._behind if rows == 1 else self._rows_behind if rows <= self.few_rows else self._many_behind
        given[1], given[self._behind_x], given[-1] = mixed.data_ptr(), x.data_ptr(), threads
        if rows > 1:
            _check_rows(rows, self.most_rows)
            given[self._behind_x + _NORM_ROWS] = rows
            is_many = rows > self.few_rows
            between = [torch.empty((rows, width), dtype=torch.bfloat16) for width in self._between[is_many]]
            for place, part in zip(self._outs[: len(between)], between, strict=True):
                given[place] = part.data_ptr()
            if is_many:
                _kept, *addresses = self.many_room(rows, threads)  # kept until the call is over
                _use(addresses, given, 3)
        LIBRARY.call_with(given, self.eps)
        return x

    def many_room(self, rows: int, threads: int) -> tuple[Tensor, int, int]:
        """Memory for many rows, owned by the caller; the address for quantised rows in it, and that for unpacked
        weights or widened rows."""
        blocks_bytes = max(
            (one.wide_bytes(rows, threads) for one in self._widened), default=threads * self.blocks_bytes
        )
        room = torch.empty(rows * self._room + blocks_bytes, dtype=torch.uint8)
        return room, room.data_ptr() + blocks_bytes, room.data_ptr()


def _use(room: Sequence[int], given: array[int], product: int) -> None:
    """The product gets the addresses of `many_room`, and the others of the call take them from there."""
    given[product + _NUMBERS], given[product + _BLOCKS] = room


def _most_rows(*, is_quantised: bool) -> int:
    if cpu_level() is CpuLevel.AMX:
        return MOST_ROWS_AMX
    return MOST_ROWS_VNNI if is_quantised and cpu_level() >= CpuLevel.AVX512VNNI else MOST_ROWS


def _check_rows(rows: int, most: int) -> None:
    if rows > most:
        raise ValueError(f"{rows} rows, this layer takes {most} at most")


def _fields(product: _Product, out: int, *, unpacks: bool = False) -> tuple[int, ...]:
    """Of `struct linear` in cpu.c, for a single row; for many those of a product that unpacks weights of 4 bits."""
    if isinstance(product, QuantizedLinear):
        found = (1, *product.product(0, out, 1, product.inner, unpacks=unpacks))
    else:
        found = (0, *product.product(0, out, 1, product.inner))
    return found + (0,) * (_PRODUCT_FIELDS - len(found))
