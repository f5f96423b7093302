"""The metadata of a GGUF file: typed access by key. Texts and arrays stay in the mapped file until they are read."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from tandem.core.errors import ModelError
from tandem.core.gguf.types import VALUE_FORMATS, ValueType

MAX_TEXT_BYTES = 16 << 20
"""Limit of one text; chat templates have some tens of KiB."""
MAX_ELEMENTS = 1 << 22
"""Limit of one array that is read; the largest vocabulary known has 2^18 tokens, and twice as many merges."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StoredText:
    """Position of a text's bytes."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Position of an array's elements, one behind the other: `count` of type `kind` in `size` bytes."""

    kind: ValueType
    start: int
    count: int
    size: int


Value = bool | int | float | StoredText | StoredArray


class Metadata:
    """The file's `values` by key; texts and arrays are read from `data`, which must stay mapped for that long.

    All readers raise ModelError, with file and key, for a value of another kind; without a value they answer `default`.
    """

    def __init__(self, path: Path, data: mmap, values: dict[str, Value]) -> None:
        self.path, self._data, self._values = path, data, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> tuple[str, ...]:
        """Keys in the order of the file."""
        return tuple(self._values)

    def error(self, key: str, why: str, todo: str = "download the file again") -> ModelError:
        """The error for a wrong value."""
        return ModelError(f"{self.path}: {key} cannot be used", why=why, todo=todo)

    def digest(self, prefix: str = "") -> str:
        """32 hex characters over all entries with keys that begin with `prefix`, in the order of the file."""
        total = hashlib.sha256()
        for key, value in self._values.items():
            if key.startswith(prefix):
                total.update(f"{len(key)} {key} {self._words(value)}\n".encode())
        return total.hexdigest()[:32]

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, StoredText):
            raise self.error(key, "it must be a text")
        return self._decoded(key, value.start, value.length)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number of any sign."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "it must be a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, which may be infinite or NaN."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "it must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(key), StoredArray)

    def texts(self, key: str) -> list[str]:
        """The elements of an array of texts; empty where there is none."""
        array = self._array(key, (ValueType.STRING,), "texts")
        if array is None:
            return []
        found, at = [], array.start
        for _ in range(array.count):
            (length,) = _LENGTH.unpack_from(self._data, at)
            found.append(self._decoded(key, at + _LENGTH.size, length))
            at += _LENGTH.size + length
        return found

    def numbers(self, key: str) -> list[float]:
        """The elements of an array of numbers, whole ones as int; empty where there is none."""
        kinds = tuple(kind for kind in VALUE_FORMATS if kind is not ValueType.BOOL)
        array = self._array(key, kinds, "numbers")
        if array is None:
            return []
        return list(struct.unpack_from(f"<{array.count}{VALUE_FORMATS[array.kind]}", self._data, array.start))

    def wholes(self, key: str) -> list[int]:
        """As `numbers`, of whole ones."""
        array = self._values.get(key)
        if isinstance(array, StoredArray) and array.kind in (ValueType.FLOAT32, ValueType.FLOAT64):
            raise self.error(key, "it must be an array of whole numbers")
        return [int(number) for number in self.numbers(key)]

    def flags(self, key: str) -> list[bool]:
        """The elements of an array of flags; empty where there is none."""
        array = self._array(key, (ValueType.BOOL,), "flags")
        return [] if array is None else [bool(one) for one in self._data[array.start : array.start + array.count]]

    def _words(self, value: Value) -> str:
        """Text that identifies a value: of texts and arrays a digest of their bytes, but not where they are."""
        if not isinstance(value, StoredText | StoredArray):
            return repr(value)
        size, kind = (value.length, ValueType.STRING) if isinstance(value, StoredText) else (value.size, value.kind)
        with memoryview(self._data) as data, data[value.start : value.start + size] as stored:
            return f"{kind:d} {size} {hashlib.sha256(stored).hexdigest()}"

    def _array(self, key: str, kinds: tuple[ValueType, ...], words: str) -> StoredArray | None:
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, StoredArray) or value.kind not in kinds:
            raise self.error(key, f"it must be an array of {words}")
        if value.count > MAX_ELEMENTS:
            raise self.error(key, f"it has {value.count} elements, and at most {MAX_ELEMENTS} are read")
        return value

    def _decoded(self, key: str, start: int, length: int) -> str:
        if length > MAX_TEXT_BYTES:
            raise self.error(key, f"a text of it has {length} bytes, and at most {MAX_TEXT_BYTES} are read")
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(key, f"it is no UTF-8: {error.reason}") from error
