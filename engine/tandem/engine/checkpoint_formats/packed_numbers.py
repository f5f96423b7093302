"""Packed matrices as slices of plain numbers, and the unpacking that formats share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.engine.checkpoint_formats.interface import StoredSlice

AT_ONCE = 1 << 22
"""Numbers that are unpacked at once, in several times their memory."""
_ROWS = 32
"""Rows at once are a multiple of it, so that none of their words is read twice."""
_WORD = 32


class PackedMatrix:
    """A matrix as a safetensors slice. `read(rows, columns)` gives some of it, in fp32 or a dtype that it fits into."""

    def __init__(self, shape: tuple[int, int], read: Callable[[slice, slice], Tensor]) -> None:
        self._shape, self._read = shape, read

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """Slices of step 1, in fp32."""
        rows, columns = (slice(*one.indices(size)[:2]) for one, size in zip(index, self._shape, strict=True))
        out = torch.empty((max(0, rows.stop - rows.start), max(0, columns.stop - columns.start)))
        together = max(1, AT_ONCE // max(1, self._shape[1]) // _ROWS) * _ROWS
        for first in range(rows.start, rows.stop, together):
            some = slice(first, min(first + together, rows.stop))
            out[some.start - rows.start : some.stop - rows.start] = self._read(some, columns)
        return out


def unpack_dense(words: Tensor, bits: int, fields: slice) -> Tensor:
    """Fields of `bits` along the last dimension of int32 `words`, lowest bits first, as int64; a field may lie in two
    words. Raises ValueError where the words have fewer, or another dtype."""
    expect(words, torch.int32)
    if fields.stop * bits > words.shape[-1] * _WORD:
        raise ValueError(f"{fields.stop} numbers of {bits} bits do not fit {words.shape[-1]} words")
    begin = torch.arange(fields.start, fields.stop) * bits
    word, shift = begin // _WORD, begin % _WORD
    wide = words.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    lower = wide[..., word] >> shift
    upper = wide[..., (word + 1).clamp_(max=words.shape[-1] - 1)] << (_WORD - shift)
    return lower.bitwise_or_(upper).bitwise_and_((1 << bits) - 1)


def expect(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """`packed`. Raises ValueError where its numbers have another dtype: they would be unpacked wrongly."""
    if packed.dtype is not dtype:
        raise ValueError(f"its packed numbers are {packed.dtype}, not {dtype}")
    return packed


def one_byte(numbers: Tensor) -> Tensor:
    """`numbers` in fp32. Raises ValueError where they have more than a byte: such are not quantised, scales or not."""
    if numbers.element_size() != 1:
        raise ValueError(f"its numbers are {numbers.dtype}, which are not quantised")
    return numbers.float()


def finite(scales: Tensor) -> Tensor:
    """`scales` in fp32. Raises ValueError where one is not a number."""
    found = scales.float()
    if not bool(found.isfinite().all()):
        raise ValueError("its scales are not finite")
    return found


def places(columns: slice, size: int) -> Tensor:
    """The group of each of `columns`, of `size` numbers a group, which may be more than 64 bits hold."""
    group = min(size, max(1, columns.stop))
    return torch.arange(columns.start, columns.stop).floor_divide_(group)


def whole(part: StoredSlice) -> Tensor:
    """All of a part, of one number, too."""
    return part[:] if part.get_shape() else part[...]
