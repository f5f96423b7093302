"""Walks through the head of a GGUF file. Nothing is allocated or read before it is known to be there."""

from __future__ import annotations

import struct
from mmap import mmap
from pathlib import Path

from tandem.core.errors import ModelError
from tandem.core.gguf.metadata import StoredArray, StoredText, Value
from tandem.core.gguf.types import VALUE_FORMATS, ValueType

MAX_DEPTH = 4
"""Arrays in arrays; no file is known that has any."""
MAX_WALKED = 1 << 22
"""Texts and arrays in arrays of one file: each has to be stepped over."""
_SCALARS = {kind: struct.Struct(f"<{letter}") for kind, letter in VALUE_FORMATS.items()}
_U32, _U64 = _SCALARS[ValueType.UINT32], _SCALARS[ValueType.UINT64]


class Cursor:
    """A position in the mapped file `data`; errors name its path. Raises ModelError for what is cut or wrong."""

    def __init__(self, path: Path, data: mmap, at: int = 0) -> None:
        self.path, self.at = path, at
        self._data, self._end = data, len(data)
        self._walked = 0

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return self._end - self.at

    def error(self, why: str) -> ModelError:
        return ModelError(f"{self.path} cannot be read as GGUF", why=why, todo="download the file again")

    def u32(self) -> int:
        return int(self._scalar(_U32))

    def u64(self) -> int:
        return int(self._scalar(_U64))

    def name(self, most_bytes: int, what: str) -> str:
        """A printable text of 1 to `most_bytes` bytes: errors name it."""
        length = self.u64()
        if not 1 <= length <= most_bytes:
            raise self.error(f"{what} has {length} bytes, and 1 to {most_bytes} are allowed")
        start = self._skip(length)
        try:
            text = self._data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is no UTF-8") from error
        if not text.isprintable():
            raise self.error(f"{what} is {text!r}")
        return text

    def value(self, key: str) -> Value:
        """A metadata value with its type before it."""
        kind = self._kind(key)
        if kind is ValueType.STRING:
            length = self.u64()
            return StoredText(self._skip(length), length)
        if kind is ValueType.ARRAY:
            return self._array(key, 1)
        found = self._scalar(_SCALARS[kind])
        if kind is ValueType.BOOL and found not in (0, 1):
            raise self.error(f"{key} is {found}, and must be 0 or 1")
        return bool(found) if kind is ValueType.BOOL else found

    def _array(self, key: str, depth: int) -> StoredArray:
        if depth > MAX_DEPTH:
            raise self.error(f"{key} has arrays in arrays, more than {MAX_DEPTH} deep")
        kind, count = self._kind(key), self.u64()
        start = self.at
        if kind in _SCALARS:
            self._skip(count * _SCALARS[kind].size)
            return StoredArray(kind, start, count, self.at - start)
        # A text has 8 bytes at least, an array in it 12.
        self._walked += count
        if count * _U64.size > self.left or self._walked > MAX_WALKED:
            raise self.error(f"{key} says that it has {count} elements")
        for _ in range(count):
            if kind is ValueType.STRING:
                self._skip(self.u64())
            else:
                self._array(key, depth + 1)
        return StoredArray(kind, start, count, self.at - start)

    def _kind(self, key: str) -> ValueType:
        number = self.u32()
        try:
            return ValueType(number)
        except ValueError:
            raise self.error(f"{key} is of type {number}, which does not exist") from None

    def _scalar(self, layout: struct.Struct) -> int | float:
        value: int | float = layout.unpack_from(self._data, self._skip(layout.size))[0]
        return value

    def _skip(self, length: int) -> int:
        """Step over `length` bytes; return their start."""
        start = self.at
        if length > self._end - start:
            raise self.error(f"it ends at byte {self._end}, and {length} bytes are named at byte {start}")
        self.at = start + length
        return start
