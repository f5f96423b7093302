"""A quantised weight in memory: made from a plain one, with the layout found for its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.cpu_library import library_of
from tandem.kernels.cpu_memory import collect_into_huge_pages
from tandem.kernels.quantized_linear.error_feedback import error_feedback, squares_of
from tandem.kernels.quantized_linear.reference import (
    GROUP,
    OUTLIERS,
    outlier_numbers_reference,
    quantize_weight_reference,
)

LIBRARY = library_of("quantized_linear")


class WeightFormat(NamedTuple):
    """Bits of a weight's number and of a row's, and how many input columns have second numbers."""

    bits: int
    row_bits: int
    outliers: int = 0

    def outliers_of(self, inner: int) -> int:
        """How many columns of a weight with `inner` of them have second numbers: narrow ones have none."""
        return self.outliers if self.outliers <= inner <= MOST_INNER - self.outliers else 0


FORMATS = {
    "int8": WeightFormat(8, 16, OUTLIERS), "w8a8": WeightFormat(8, 8), "int4": WeightFormat(4, 8),
    "w4a16": WeightFormat(4, 16),
}  # fmt: skip
"""By the name of the format. Where rows have 16 bits, the rounding of 8-bit weights is what costs answers."""
MOST_INNER = 1 << 16
"""Sums of so many products of 8 bits fit 32."""
PRODUCT, GATED, MANY, BYTES, NIBBLES = range(5)
"""Operations of the C code."""
AVX2_PATH, AMX_PATH = 2, 3
"""LIBRARY.path on AVX2, and with a matrix unit."""
TILE, COLUMNS = 64, 64
"""Inner numbers of a tile of the matrix unit; columns of a block, and of the part that the C code gates at a time."""
_UNPACKED_BLOCKS = 2
_TOGETHER = 8
"""TOGETHER of the C code."""
_GROUP_BYTES = 2 * COLUMNS + COLUMNS * GROUP // 2


@dataclass(frozen=True, slots=True)
class Layout:
    """Packed numbers of so many `bits` at `address`, COLUMNS in `block_bytes`; minus the columns' sums at `sums`."""

    address: int
    block_bytes: int
    bits: int
    sums: int


class QuantizedWeight:
    """A `weight` `[columns, inner]` of float32 or bfloat16, quantised; keeps nothing of the original.

    `layout` is what the C code reads, None where it has no part. Without it 8 bits are kept for either number of bits:
    `packed` for oneDNN's products where they are exact, plain int8 `numbers` elsewhere. Raises ValueError for a weight
    that no kind of sum can hold, and TypeError for another dtype.

    `importance`: mean squares of the inputs, `[inner]` and positive, or mean products of any two, `[inner, inner]`.
    Of 4 bits they weight errors, see `quantize_weight_reference`; of 8 the inner numbers with the largest squares,
    `outliers` of them, have second numbers.
    `summed`: inner numbers of a product, those included.
    """

    __slots__ = (
        "_kept", "bits", "columns", "dtype", "inner", "layout", "numbers", "outliers", "packed", "scales", "summed",
        "sums",
    )  # fmt: skip

    def __init__(self, weight: Tensor, bits: int, importance: Tensor | None = None, outliers: int = 0) -> None:
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"weights to quantise are float32 or bfloat16, not {weight.dtype}")
        self.columns, self.inner = weight.shape
        if not 0 < self.inner <= MOST_INNER - outliers:
            raise ValueError(f"{self.inner} inner numbers: quantised products have from 1 to {MOST_INNER - outliers}")
        if outliers and (outliers != OUTLIERS or bits != 8 or self.inner < outliers):  # the C code has room for these
            raise ValueError(
                f"{outliers} outliers of {self.inner} numbers of {bits} bits: {OUTLIERS} of 8 bits are possible"
            )
        squares = squares_of(importance)
        self.outliers = _largest(squares, outliers) if outliers else None
        self.summed = self.inner + outliers
        self.bits, self.dtype = bits, weight.dtype
        self.scales = torch.zeros(_padded(self.columns), dtype=torch.float32)
        self.packed: Tensor | None = None
        self.numbers: Tensor | None = None
        self.layout: Layout | None = None
        self.sums: Tensor | None = None
        self._kept: Tensor | None = None
        has_code = LIBRARY.serves()
        feedback = error_feedback(importance) if bits == 4 else None
        if bits == 4 and has_code:
            self._make_nibbles(weight.contiguous(), squares, feedback)
        else:
            self._make_bytes(weight.contiguous(), squares, feedback, has_code=has_code)
        if self.layout is not None:
            blocks = -(-self.columns // COLUMNS)
            collect_into_huge_pages(self.layout.address, blocks * self.layout.block_bytes)

    def _make_nibbles(self, weight: Tensor, squares: Tensor | None, feedback: Tensor | None) -> None:
        block_bytes = -(-self.inner // GROUP) * _GROUP_BYTES
        self._kept = torch.zeros((_padded(self.columns) // COLUMNS, block_bytes), dtype=torch.uint8)
        self.sums = torch.zeros(_padded(self.columns), dtype=torch.int32)
        self._quantize(NIBBLES, weight, self._kept, block_bytes, squares, feedback)
        self.layout = Layout(self._kept.data_ptr(), block_bytes, 4, self.sums.data_ptr())

    def _make_bytes(self, weight: Tensor, squares: Tensor | None, feedback: Tensor | None, *, has_code: bool) -> None:
        if has_code:
            numbers = torch.empty((self.columns, self.inner), dtype=torch.int8)
            self._quantize(BYTES, weight, numbers, 0)
        else:
            found = quantize_weight_reference(weight, self.bits, squares, feedback)
            numbers, self.scales[: self.columns] = found
        if self.outliers is not None:
            scales = self.scales[: self.columns]
            numbers = torch.cat((numbers, outlier_numbers_reference(weight, numbers, scales, self.outliers)), 1)
        if has_code:
            self._kept, block_bytes = _packed_by_fours(numbers)
            self.sums = torch.zeros(_padded(self.columns), dtype=torch.int32)
            self.sums[: self.columns] = numbers.sum(1, dtype=torch.int32).neg_()
            self.layout = Layout(self._kept.data_ptr(), block_bytes, 8, self.sums.data_ptr())
        elif has_onednn():
            self.packed = torch.ops.onednn.qlinear_prepack(numbers, None)
        else:
            self.numbers = numbers

    def _quantize(
        self, work: int, weight: Tensor, numbers: Tensor, block_bytes: int, squares: Tensor | None = None,
        feedback: Tensor | None = None,
    ) -> None:  # fmt: skip
        threads = torch.get_num_threads()
        by = None if squares is None else squares.float().contiguous()
        room = torch.empty((threads, _TOGETHER, -(-self.inner // GROUP) * GROUP) if work == NIBBLES else 0)
        given = [0 if one is None else one.data_ptr() for one in (self.sums, by, feedback)]
        LIBRARY.call((
            work, weight.data_ptr(), numbers.data_ptr(), self.scales.data_ptr(), *given, room.data_ptr(), self.columns,
            self.inner, weight.dtype is torch.bfloat16, block_bytes, threads,
        ))  # fmt: skip


def _largest(importance: Tensor | None, count: int) -> Tensor:
    """Indices int32 of the `count` largest ones, ascending; the first ones where nothing is known."""
    if importance is None:
        return torch.arange(count, dtype=torch.int32)
    order = importance.float().argsort(descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)


def packed_bytes(columns: int, inner: int, bits: int) -> int:
    """Memory of a quantised weight, a few bytes a column and padding included."""
    padded = _padded(columns)
    if bits == 4:
        return padded // COLUMNS * -(-inner // GROUP) * _GROUP_BYTES + 8 * padded
    return padded * -(-inner // 4) * 4 + 8 * padded


def blocks_bytes(inner: int) -> int:
    """Memory in which a thread unpacks blocks of 4 bits to 8."""
    return _UNPACKED_BLOCKS * (COLUMNS * -(-inner // GROUP) * GROUP + TILE * COLUMNS)


@cache
def has_onednn() -> bool:
    """True if oneDNN's products of u8 and s8 exist and are exact: without VNNI they add pairs up in 16 bits."""
    is_there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")  # type: ignore[no-untyped-call]
    return is_there and cpu_level() >= CpuLevel.AVX512VNNI


def _packed_by_fours(numbers: Tensor) -> tuple[Tensor, int]:
    """int8 `[columns, inner]` as `[blocks, inner / 4, 64, 4]`, filled up with zeros, and the bytes of a block.

    A tile more lies behind the last one: the matrix unit may read there, and multiplies it with zeros.
    """
    columns, inner = numbers.shape
    fours, rest = -(-inner // 4), (0, -inner % 4, 0, _padded(columns) - columns)
    whole = torch.nn.functional.pad(numbers, rest) if any(rest) else numbers  # a copy of the largest matrix less
    room = torch.zeros(whole.numel() + TILE * COLUMNS, dtype=torch.int8)
    room[: whole.numel()].view(-1, fours, COLUMNS, 4).copy_(whole.view(-1, COLUMNS, fours, 4).transpose(1, 2))
    return room, 4 * fours * COLUMNS


def _padded(columns: int) -> int:
    return -(-columns // COLUMNS) * COLUMNS
