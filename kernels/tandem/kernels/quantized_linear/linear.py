"""Products of rows with a quantised weight: which code multiplies how many rows."""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import Tensor

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.quantized_linear.reference import (
    GROUP,
    PLANE,
    planes_reference,
    quantize_rows_reference,
    quantized_linear_reference,
    with_outliers_reference,
)  # fmt: skip
from tandem.kernels.quantized_linear.weight import (
    AVX2_PATH,
    COLUMNS,
    GATED,
    LIBRARY,
    MANY,
    PRODUCT,
    ROWS,
    SCALE,
    SCALE_BF16,
    Layout,
    QuantizedWeight,
    Unpacked,
    has_onednn,
)  # fmt: skip
from tandem.kernels.silu_mul import silu_mul

FEW_ROWS = {8: 8, 4: 32}
"""Up to so many rows use the numbers as they lie, by bits. For more rows, 4 bits are unpacked to 8 first, and 8 bits
go to oneDNN where that is preferred."""
_MANY_ROWS = {(8, 1): 10, (8, 2): 4, (4, 1): sys.maxsize, (4, 2): 6}
"""From so many rows on, by the bits of weights and the planes of rows, AVX2 widens weights to 16 bits and multiplies
_TILE_ROWS by _PANEL_COLUMNS at a time; of 8 bits as MANY_ROWS in many_rows.h. 4 bits and one plane gain nothing."""
_TILE_ROWS, _PANEL_COLUMNS = 6, 16
_MANY_STRIPS = 8
"""For each thread, where they cannot all have as many: one of them then has an eighth more."""


class QuantizedLinear:
    """x · weightᵀ + bias for a quantised weight; rows are quantised, too, each with its own scale.

    A call takes `[rows, inner]` in the dtype that the weight had and returns `[rows, columns]` in it, owned by the
    caller. `row_bits` are 8 or 16. With `is_exact` a row's result is the reference's to the last bit, whatever its
    neighbours; otherwise rows that oneDNN multiplies are rounded twice, of 8 bits in bfloat16 alone. `unpacked` is for
    weights of 4 bits: their products may be computed by one thread at a time.
    """

    __slots__ = (
        "_bias", "_few_rows", "_is_exact", "_no_zero_point", "_planes", "_prefers_onednn", "_unpacked", "weight",
    )  # fmt: skip

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, unpacked: Unpacked, is_exact: bool = False,
        row_bits: int = 8,
    ) -> None:  # fmt: skip
        self.weight, self._unpacked = weight, unpacked
        self._planes = row_bits // 8
        self._is_exact = is_exact or weight.dtype is torch.float32
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros_like(weight.scales)
            self._bias[: weight.columns] = bias
        self._prefers_onednn = prefers_onednn() and not (is_exact and row_bits == 16)
        self._few_rows = FEW_ROWS[weight.bits] if weight.bits == 4 or self._prefers_onednn else sys.maxsize
        self._no_zero_point = torch.zeros(weight.columns, dtype=torch.int64)

    OUT = 5
    """The result's place among the fields of `product`."""

    @property
    def columns(self) -> int:
        return self.weight.columns

    @property
    def inner(self) -> int:
        return self.weight.inner

    @property
    def has_single_rows(self) -> bool:
        """True if a fused layer's C code multiplies single rows of bfloat16: with VNNI, and with AVX2 alone."""
        has_code = has_onednn() or cpu_level() < CpuLevel.AVX512
        return self.weight.layout is not None and self.weight.dtype is torch.bfloat16 and has_code

    @property
    def has_strips(self) -> bool:
        """True if the columns are whole strips of gates and as many strips of gated numbers."""
        return self.weight.columns % (2 * COLUMNS) == 0

    def rows_within(self, stack_bytes: int) -> int:
        """How many rows a fused layer's thread may quantise within so many bytes of its stack; it has half as many more
        for rows and a panel of columns that AVX2 widens."""
        summed = self.weight.summed
        plain = stack_bytes // (self._planes * summed)
        if not self._may_widen:
            return plain
        panel = 2 * (_PANEL_COLUMNS + _TILE_ROWS - 1) * summed
        widened = (3 * stack_bytes // 2 - panel) // ((self._planes + 2) * summed)
        return min(plain, max(widened, self._many_rows - 1))

    @property
    def _many_rows(self) -> int:
        return _MANY_ROWS[self.weight.bits, self._planes]

    @property
    def _may_widen(self) -> bool:
        """In a fused layer."""
        return self.weight.bits == 8 and LIBRARY.path == AVX2_PATH

    @property
    def takes_many(self) -> bool:
        """True if the C code multiplies any number of rows. It reads the numbers as they lie, in blocks of strips."""
        layout = self.weight.layout
        is_whole = layout is not None and layout.bits == 8 and layout.block == COLUMNS
        return is_whole and not self._prefers_onednn

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        layout, packed = self._find(x.shape[0])
        if x.stride(1) != 1:
            x = x.contiguous()
        if layout is not None:
            is_many = LIBRARY.path == AVX2_PATH and x.shape[0] >= self._many_rows
            work = MANY if is_many else PRODUCT
            return self._multiply_by_code(work, x, layout, weight.columns)
        if packed is None:
            assert weight.numbers is not None
            bias = None if self._bias is None else self._bias[: weight.columns]
            scales = weight.scales[: weight.columns]
            return quantized_linear_reference(x, weight.numbers, scales, bias, 8 * self._planes, weight.outliers)
        return self._multiply_many(x, packed)

    def gated(self, x: Tensor) -> Tensor:
        """`silu_mul` of a call's result, to the last bit: `[rows, columns / 2]`."""
        strips, threads = self.weight.columns // (2 * COLUMNS), torch.get_num_threads()
        is_shared_out = self.has_strips and (strips % threads == 0 or strips >= _MANY_STRIPS * threads)
        is_ours = x.shape[0] <= self._few_rows or not self._prefers_onednn
        layout = self._find(x.shape[0])[0] if is_shared_out and is_ours else None
        if layout is None or layout.block != COLUMNS:
            return silu_mul(self(x))
        return self._multiply_by_code(GATED, x if x.stride(1) == 1 else x.contiguous(), layout, strips * COLUMNS)

    def _find(self, rows: int) -> tuple[Layout | None, Tensor | None]:
        """Return the layout for the C code if it multiplies so many rows, else oneDNN's packed tensor."""
        weight = self.weight
        if weight.layout is None or rows <= self._few_rows:
            return weight.layout, weight.packed
        if weight.packed is not None:
            return None, weight.packed
        unpacked = self._unpacked.fill(weight)
        if unpacked is None:
            return weight.layout, None
        packed, layout = unpacked
        return (None, packed) if self._prefers_onednn else (layout, None)

    def product(self, x: int, out: int, rows: int, x_stride: int, scratch: int = 0) -> tuple[int, ...]:
        """The fields of `struct quantized` in product.h, for rows at the address `x`, a result at `out` and
        `scratch_bytes` of memory at `scratch`, on one thread."""
        return self._product_with(self.weight.layout, x, out, rows, x_stride, scratch)

    def _product_with(
        self, layout: Layout | None, x: int, out: int, rows: int, x_stride: int, scratch: int
    ) -> tuple[int, ...]:
        weight, place, bits = self.weight, (0, 0, 0, 0), self.weight.bits
        if layout is not None:
            place, bits = (layout.address, layout.sums, layout.block, layout.block_bytes), layout.bits
        bias = 0 if self._bias is None else self._bias.data_ptr()
        stride = _stride(weight.summed)
        scales = scratch + rows * self._planes * stride
        outliers = 0 if weight.outliers is None else weight.outliers.data_ptr()
        return (
            x, place[0], weight.scales.data_ptr(), place[1], bias, out, rows, weight.summed, weight.columns, x_stride,
            place[2], place[3], bits, weight.dtype is torch.bfloat16, self._planes, scratch, scales, scales + 4 * rows,
            stride, weight.inner, outliers, 1,
        )  # fmt: skip

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of scratch memory that `product` needs."""
        stride = _stride(self.weight.summed)
        return rows * (self._planes * (stride + 4 * stride // GROUP) + 4)

    def _multiply_by_code(self, work: int, x: Tensor, layout: Layout, width: int) -> Tensor:
        rows = x.shape[0]
        out = torch.empty((rows, width), dtype=x.dtype)
        scratch = torch.empty(self.scratch_bytes(rows), dtype=torch.uint8)
        fields = self._product_with(layout, x.data_ptr(), out.data_ptr(), rows, x.stride(0), scratch.data_ptr())
        threads, room = torch.get_num_threads(), tuple[int, ...]()
        if work == MANY:
            stride, tiles = _stride(self.weight.summed), -(-rows // _TILE_ROWS)
            wide = torch.empty((tiles * _TILE_ROWS + threads * _PANEL_COLUMNS) * stride, dtype=torch.int16)
            address = wide.data_ptr()
            room = (address, address + 2 * tiles * _TILE_ROWS * stride)
        LIBRARY.call((work, *fields[:-1], threads, *room))
        return out

    def _multiply_many(self, x: Tensor, packed: Tensor) -> Tensor:
        weight, rows = self.weight, x.shape[0]
        if not LIBRARY.is_available():
            numbers, row_scales = quantize_rows_reference(with_outliers_reference(x, weight.outliers), 8 * self._planes)
            bytes_of = numbers if self._planes == 1 else planes_reference(numbers)
            sums = self._product(bytes_of.view(torch.uint8).bitwise_xor(0x80), packed, torch.float32)
            if self._planes == 2:
                sums = sums[::2] * PLANE + sums[1::2]
            out = sums.mul_(row_scales[:, None])
            return out.to(x.dtype) if self._bias is None else out.add_(self._bias[: weight.columns]).to(x.dtype)
        room = torch.empty(self.scratch_bytes(rows), dtype=torch.uint8)
        fields = list(self.product(x.data_ptr(), 0, rows, x.stride(0), room.data_ptr()))
        fields[_BITS], fields[-1] = 8, torch.get_num_threads()
        LIBRARY.call((ROWS, *fields))
        stride = _stride(weight.summed)
        numbers = room[: rows * self._planes * stride].view(rows * self._planes, stride)
        if stride != weight.summed:
            numbers = numbers[:, : weight.summed].contiguous()
        is_wide = self._is_exact or self._planes == 2
        products = self._product(numbers, packed, torch.float32 if is_wide else torch.bfloat16)
        is_same = products.dtype is x.dtype and self._planes == 1
        out = products if is_same else torch.empty((rows, weight.columns), dtype=x.dtype)
        fields[0], fields[self.OUT] = products.data_ptr(), out.data_ptr()
        LIBRARY.call((SCALE if products.dtype is torch.float32 else SCALE_BF16, *fields))
        return out

    def _product(self, numbers: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 rows with 128 added, by oneDNN, times the columns' scales."""
        scales = self.weight.scales[: self.weight.columns]
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            numbers, 1.0, 128, packed, scales, self._no_zero_point, None, 1.0, 0, dtype, "none", [], ""
        )
        return product


_BITS = 12
"""Its place among the fields of `product`."""


@cache
def prefers_onednn() -> bool:
    """True if oneDNN multiplies many rows: it is faster with a matrix unit, and has larger tiles without VNNI.

    With VNNI alone the C code takes 0.91 to 0.97 of its time with the passes around it: 512 rows, two cores.
    """
    return cpu_level() not in range(CpuLevel.AVX512VNNI, CpuLevel.AMX)


def _stride(inner: int) -> int:
    return -(-inner // GROUP) * GROUP
