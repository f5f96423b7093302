"""Matrix products of bfloat16 rows with a fixed weight on the CPU, from one packed copy of it.

oneDNN packs the weight and multiplies many rows; few rows go to C code that reads the same bytes at memory's speed. The
packed format is oneDNN's own: a weight is left to oneDNN alone if its bytes do not lie where the C code looks for them.
For AVX2 oneDNN packs no bfloat16: the weight is packed here, and the C code multiplies any number of rows.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.backend import uses_native
from tandem.kernels.cpu_library import CPU, LANES, library_of
from tandem.kernels.cpu_memory import collect_into_huge_pages
from tandem.kernels.dtypes import has_bf16_products
from tandem.kernels.widened_linear import widened_linear

__all__ = ["LIBRARY", "PrepackedLinear", "address_of", "find_layout", "packs"]

LIBRARY = library_of("prepacked_linear")
FEW_ROWS, FEW_ROWS_AMX = 32, 64
"""Up to so many rows go to the C code, without and with a matrix unit. Measured on two cores: with AMX 2 to 16 rows
read weights at 1.4 times oneDNN's speed, 64 rows as fast; without it 2 to 32 rows take 0.6 to 1.0 of oneDNN's time."""
NARROW_COLUMNS, NARROW_ROWS = 640, range(256, 1024)
"""So many rows of a weight with at most so many columns go there, too, with AMX and several threads: oneDNN leaves all
but one thread without work then. Measured with 576 columns: 1.0 to 1.9 times as fast."""
_AMX, _AVX2 = 2, 3  # what tandem_choose_path answers
_OWN_BLOCK = 16
_TILE_ROWS = 6
"""Rows of a tile in float32, with AVX2."""
_DIRECT_ROWS = 8
"""Most rows that are multiplied as they are, with AVX2. Measured on one core of a Zen 3: tiles take 1.2 of the time for
8 rows, 0.8 for 12, and 0.7 to 0.9 for 512."""
_TOGETHER_ROWS = 510
"""Most rows whose float32 numbers have memory at a time; whole tiles."""
_AMX_INNER = 32
_BLOCKS = (64, 48, 32, 16)
_INNER_BLOCKS = (64, 32, 16, 2)
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Packed numbers at `address`, as `[columns / block][inner / 2][block][2]`; `block_numbers` from block to block."""

    address: int
    block: int
    block_numbers: int


class PrepackedLinear:
    """x · weightᵀ + bias for a `weight` `[columns, inner]` on the CPU, float32 or bfloat16, which is copied.

    A call takes `[rows, inner]` in the weight's dtype and returns `[rows, columns]`, owned by the caller. Thread-safe.
    `layout` is None where the C code has no part in it. Below AVX-512 a weight of bfloat16 that the C code does not
    take is kept as it is, and `widened_linear` multiplies.
    """

    __slots__ = (
        "_bias", "_few_rows", "_is_narrow", "_multiply", "_own", "_packed", "_plain", "columns", "inner", "layout",
    )  # fmt: skip

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.columns, self.inner = weight.shape
        self._bias = None if bias is None else bias.contiguous()
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self.layout: PackedLayout | None = None
        self._plain: Tensor | None = None
        self._own: Tensor | None = None
        self._few_rows, self._is_narrow = 0, False
        if not packs(weight.dtype):
            if self.columns % _OWN_BLOCK or self.inner % 2 or not (self.inner and LIBRARY.serves()):
                self._plain = weight.clone(memory_format=torch.contiguous_format)
                return
            self._own = weight.reshape(-1, _OWN_BLOCK, self.inner // 2, 2).transpose(1, 2).contiguous()
            collect_into_huge_pages(self._own.data_ptr(), self._own.nbytes)
            self.layout = PackedLayout(self._own.data_ptr(), _OWN_BLOCK, self.inner * _OWN_BLOCK)
            self._few_rows = sys.maxsize
            return
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        if address := address_of(self._packed):
            collect_into_huge_pages(address, int(torch.ops.mkldnn._nbytes(self._packed)))
        self.layout = find_layout(self._packed, weight)
        self._few_rows = _few_rows(self.inner) if self.layout is not None and uses_native(CPU) else 0
        self._is_narrow = self._few_rows == FEW_ROWS_AMX and self.columns <= NARROW_COLUMNS

    OUT = 3
    """The result's place among the fields of `product`."""

    @property
    def has_single_rows(self) -> bool:
        """True if C code multiplies single rows of bfloat16."""
        return self.layout is not None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not rows:  # the head of a chunk that does not end a prompt
            return x.new_empty((0, self.columns))
        if rows <= self._few_rows and LIBRARY.is_available():
            return self._multiply_by_code(x)
        if self._is_narrow and rows in NARROW_ROWS and torch.get_num_threads() > 1 and LIBRARY.is_available():
            return self._multiply_by_code(x)
        if self._own is not None:  # the C code was switched off
            plain = self._own.transpose(1, 2).reshape(self.columns, self.inner)
            return widened_linear(x, plain, self._bias)
        if self._plain is not None:
            return widened_linear(x, self._plain, self._bias)
        product: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product

    def product(self, x: int, out: int, rows: int, x_stride: int) -> tuple[int, ...]:
        """The fields of `struct product` in cpu.c, for rows at the address `x` and a result at `out`, on one thread.

        Raises ValueError where the C code does not know the layout.
        """
        if self.layout is None:
            raise ValueError("the C code does not know how this weight is packed")
        bias = 0 if self._bias is None else self._bias.data_ptr()
        place = (self.layout.block, self.layout.block_numbers)
        return (x, self.layout.address, bias, out, rows, self.inner, self.columns, x_stride, *place, 0, 1)

    def _multiply_by_code(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, threads = x.shape[0], torch.get_num_threads()
        out = torch.empty((rows, self.columns), dtype=torch.bfloat16)
        if LIBRARY.path != _AVX2 or rows <= _DIRECT_ROWS:
            LIBRARY.call((*self.product(x.data_ptr(), out.data_ptr(), rows, x.stride(0))[:-2], 0, threads))
            return out
        tiles = -(-min(rows, _TOGETHER_ROWS) // _TILE_ROWS)
        wide = torch.empty(tiles * _TILE_ROWS * self.inner)
        for first in range(0, rows, _TOGETHER_ROWS):
            some, into = x[first : first + _TOGETHER_ROWS], out[first : first + _TOGETHER_ROWS]
            fields = self.product(some.data_ptr(), into.data_ptr(), some.shape[0], x.stride(0))
            LIBRARY.call((*fields[:-2], wide.data_ptr(), threads))
        return out


def packs(dtype: torch.dtype) -> bool:
    """True if oneDNN packs weights of this dtype on this CPU: float32 always, bfloat16 from AVX-512 on."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and has_bf16_products())


def _few_rows(inner: int) -> int:
    return FEW_ROWS_AMX if LIBRARY.path == _AMX and inner % _AMX_INNER == 0 else FEW_ROWS


def find_layout(packed: Tensor, weight: Tensor) -> PackedLayout | None:
    """Find where the numbers of a bfloat16 `weight` lie in its `packed` form; None for a layout unknown to the C code.

    Compares up to 16 blocks of columns with the weight. None, too, where there is no C code for this machine, and for a
    weight with numbers that do not distinguish one place from another, such as zeros alone.
    """
    columns, inner = weight.shape
    if weight.dtype is not torch.bfloat16 or columns % LANES or inner % 2 or not LIBRARY.is_available():
        return None
    address = address_of(packed)
    if address is None:
        return None
    numbers = int(torch.ops.mkldnn._nbytes(packed)) // 2
    sizes = {
        (block, -(-inner // inner_block) * inner_block * block) for block in _BLOCKS for inner_block in _INNER_BLOCKS
    }
    layouts = [PackedLayout(address, *size) for size in sorted(sizes) if -(-columns // size[0]) * size[1] == numbers]
    found = [layout for layout in layouts if _fits(weight, layout)]
    return found[0] if len(found) == 1 else None


def _fits(weight: Tensor, layout: PackedLayout) -> bool:
    columns, inner = weight.shape
    whole, size = columns // layout.block, inner * layout.block
    for index in sorted({place * (whole - 1) // (_SAMPLES - 1) for place in range(_SAMPLES)} if whole else ()):
        raw = (ctypes.c_uint16 * size).from_address(layout.address + 2 * index * layout.block_numbers)
        there = torch.frombuffer(raw, dtype=torch.int16).view(inner // 2, layout.block, 2)
        here = weight[index * layout.block : (index + 1) * layout.block].contiguous().view(torch.int16)
        if not torch.equal(there.transpose(0, 1).reshape(layout.block, inner), here):
            return False
    return whole > 0


def address_of(packed: Tensor) -> int | None:
    """Address of a packed tensor's bytes; None if this torch does not reveal it, for `data_ptr` hides it."""
    if (functions := _handle_functions()) is None:
        return None
    data_pointer, delete = functions
    handle = _capsule_pointer(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([packed])[0], None)
    try:
        address = ctypes.c_void_p()
        has_failed = data_pointer(handle, ctypes.byref(address))
        return None if has_failed else address.value
    finally:  # stealing the tensor back in Python keeps a reference to it for ever
        delete(handle)


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


@cache
def _handle_functions() -> tuple[Any, Any] | None:
    """`aoti_torch_get_data_ptr` and `aoti_torch_delete_tensor_object` of torch's C interface, or None."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        data_pointer, delete = library.aoti_torch_get_data_ptr, library.aoti_torch_delete_tensor_object
    except (OSError, AttributeError):
        return None
    if not hasattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors"):
        return None
    data_pointer.argtypes, data_pointer.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    delete.argtypes, delete.restype = (ctypes.c_void_p,), ctypes.c_int
    return data_pointer, delete
