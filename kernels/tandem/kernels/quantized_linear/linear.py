"""Products of rows with a quantised weight: which code multiplies how many rows."""

from __future__ import annotations

import sys

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
    AMX_PATH,
    AVX2_PATH,
    COLUMNS,
    GATED,
    LIBRARY,
    MANY,
    PRODUCT,
    TILE,
    QuantizedWeight,
    blocks_bytes,
)  # fmt: skip
from tandem.kernels.silu_mul import silu_mul

FEW_ROWS = 4
"""Up to so many rows of 8 bits are multiplied with 4 bits as they lie. For more, AVX-512 unpacks those to 8 bits, block
by block. As in product.h."""
_MANY_ROWS = {(8, 1): 14, (8, 2): 4, (4, 1): sys.maxsize, (4, 2): 12}
"""From so many rows on, by the bits of weights and the planes of rows, AVX2 widens weights to 16 bits and multiplies
_TILE_ROWS by _PANEL_COLUMNS at a time, as MANY_ROWS in many_rows.h. 4 bits and one plane gain nothing."""
_TILE_ROWS, _PANEL_COLUMNS = 6, 16
_MANY_STRIPS = 8
"""For each thread, where they cannot all have as many: one of them then has an eighth more."""


class QuantizedLinear:
    """x · weightᵀ + bias for a quantised weight; rows are quantised, too, each with its own scale.

    A call takes `[rows, inner]` in the dtype that the weight had and returns `[rows, columns]` in it, owned by the
    caller. `row_bits` are 8 or 16. A row's result is the reference's to the last bit, whatever its neighbours; without
    the C code those of oneDNN are not, for rows of 16 bits.
    """

    __slots__ = ("_bias", "_planes", "weight")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, *, row_bits: int = 8) -> None:
        self.weight = weight
        self._planes = row_bits // 8
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros_like(weight.scales)
            self._bias[: weight.columns] = bias

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
        has_code = self.weight.layout is not None and cpu_level() is not CpuLevel.AVX512
        return has_code and self.weight.dtype is torch.bfloat16

    @property
    def has_strips(self) -> bool:
        """True if the columns are whole strips of gates and as many strips of gated numbers."""
        return self.weight.columns % (2 * COLUMNS) == 0

    def rows_within(self, stack_bytes: int) -> int:
        """How many rows a fused layer's thread may quantise within so many bytes of its stack; it has half as many more
        for rows and a panel of columns that AVX2 widens."""
        summed = self.weight.summed
        plain = stack_bytes // (self._planes * summed)
        if not self.widens(sys.maxsize):
            return plain
        panel = 2 * (_PANEL_COLUMNS + _TILE_ROWS - 1) * summed
        widened = (3 * stack_bytes // 2 - panel) // ((self._planes + 2) * summed)
        return min(plain, max(widened, self._many_rows - 1))

    @property
    def _many_rows(self) -> int:
        return _MANY_ROWS[self.weight.bits, self._planes]

    def widens(self, rows: int) -> bool:
        """True if AVX2 widens so many rows for a product."""
        return LIBRARY.path == AVX2_PATH and self._many_rows <= min(rows, sys.maxsize - 1)

    def wide_bytes(self, rows: int, threads: int) -> int:
        """Bytes of memory for so many rows, widened, and behind them a panel of columns for each thread."""
        return 2 * (_whole_tiles(rows) + threads * _PANEL_COLUMNS) * _stride(self.weight.summed, has_bytes=True)

    @property
    def few_rows(self) -> int:
        """Up to so many rows a fused layer's C code multiplies with the weight as it lies."""
        return sys.maxsize if self.weight.bits == 8 or LIBRARY.path == AVX2_PATH else FEW_ROWS // self._planes

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        if self.weight.layout is None:
            return self._multiply_by_torch(x)
        return self._multiply_by_code(MANY if self.widens(x.shape[0]) else PRODUCT, x, self.weight.columns)

    def gated(self, x: Tensor) -> Tensor:
        """`silu_mul` of a call's result, to the last bit: `[rows, columns / 2]`."""
        strips, threads = self.weight.columns // (2 * COLUMNS), torch.get_num_threads()
        is_shared_out = self.has_strips and (strips % threads == 0 or strips >= _MANY_STRIPS * threads)
        if self.weight.layout is None or not is_shared_out or self.widens(x.shape[0]):
            return silu_mul(self(x))
        return self._multiply_by_code(GATED, x if x.stride(1) == 1 else x.contiguous(), strips * COLUMNS)

    def product(
        self, x: int, out: int, rows: int, x_stride: int, scratch: int = 0, *, unpacks: bool = False, blocks: int = 0
    ) -> tuple[int, ...]:
        """The fields of `struct quantized` in product.h, for rows at the address `x`, a result at `out` and
        `scratch_bytes` of memory at `scratch`, on one thread. `unpacks`: weights of 4 bits, in `blocks_bytes` for each
        thread at `blocks`."""
        weight, layout = self.weight, self.weight.layout
        place = (0, 0, 0) if layout is None else (layout.address, layout.sums, layout.block_bytes)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        stride = _stride(weight.summed, has_bytes=weight.bits == 8 or unpacks)
        scales = scratch + rows * self._planes * stride
        outliers = 0 if weight.outliers is None else weight.outliers.data_ptr()
        return (
            x, place[0], weight.scales.data_ptr(), place[1], bias, out, rows, weight.summed, weight.columns, x_stride,
            place[2], weight.bits, weight.dtype is torch.bfloat16, self._planes, scratch, scales, scales + 4 * rows,
            stride, weight.inner, outliers, blocks, 1,
        )  # fmt: skip

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of scratch memory that `product` needs."""
        stride = _stride(self.weight.summed, has_bytes=True)
        return rows * (self._planes * (stride + 4 * stride // GROUP) + 4)

    def blocks_bytes(self, threads: int) -> int:
        """Bytes of memory in which so many threads unpack blocks of 4 bits, for more than `few_rows` rows."""
        return 0 if self.few_rows == sys.maxsize else threads * blocks_bytes(self.weight.inner)

    def _multiply_by_code(self, work: int, x: Tensor, width: int) -> Tensor:
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty((rows, width), dtype=x.dtype)
        unpacks = rows > self.few_rows
        blocks = self.blocks_bytes(threads) if unpacks else 0
        room = torch.empty(blocks + self.scratch_bytes(rows), dtype=torch.uint8)
        address = room.data_ptr()
        fields = self.product(
            x.data_ptr(), out.data_ptr(), rows, x.stride(0), address + blocks,
            unpacks=unpacks, blocks=address if unpacks else 0,
        )  # fmt: skip
        wide_room = tuple[int, ...]()
        if work == MANY:
            wide = torch.empty(self.wide_bytes(rows, threads), dtype=torch.uint8)
            wide_room = (wide.data_ptr(), wide.data_ptr() + 2 * _whole_tiles(rows) * fields[_STRIDE])
        LIBRARY.call((work, *fields[:-1], threads, *wide_room))
        return out

    def _multiply_by_torch(self, x: Tensor) -> Tensor:
        """By oneDNN where it is exact, which takes uint8 rows with 128 added."""
        weight = self.weight
        scales = weight.scales[: weight.columns]
        bias = None if self._bias is None else self._bias[: weight.columns]
        if weight.packed is None:
            assert weight.numbers is not None
            return quantized_linear_reference(x, weight.numbers, scales, bias, 8 * self._planes, weight.outliers)
        numbers, row_scales = quantize_rows_reference(with_outliers_reference(x, weight.outliers), 8 * self._planes)
        bytes_of = (numbers if self._planes == 1 else planes_reference(numbers)).view(torch.uint8).bitwise_xor(0x80)
        no_zero_point = torch.zeros(weight.columns, dtype=torch.int64)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            bytes_of, 1.0, 128, weight.packed, scales, no_zero_point, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if self._planes == 2:
            sums = sums[::2] * PLANE + sums[1::2]
        out = sums.mul_(row_scales[:, None])
        return (out if bias is None else out.add_(bias)).to(x.dtype)


_STRIDE = 17
"""Its place among the fields of `product`."""


def _whole_tiles(rows: int) -> int:
    return -(-rows // _TILE_ROWS) * _TILE_ROWS


def _stride(inner: int, *, has_bytes: bool) -> int:
    """Bytes from one row of numbers to the next: whole groups, or whole tiles where 8 bits go to the matrix unit."""
    whole = TILE if has_bytes and LIBRARY.path == AMX_PATH else GROUP
    return -(-inner // whole) * whole
