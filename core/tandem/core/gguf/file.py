"""One mapped GGUF file: metadata, and where each tensor's bytes are.

    magic, version, counts | metadata | tensor directory | padding | tensors, each aligned

The GGUF specification of ggml. Version 1, and files of big-endian machines, are refused.
"""

from __future__ import annotations

import itertools
import mmap
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tandem.core.errors import ModelError
from tandem.core.gguf.cursor import Cursor
from tandem.core.gguf.metadata import Metadata, Value
from tandem.core.gguf.types import TENSOR_TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
_HEAD_BYTES = 24
_KEY_BYTES = 8 + 1 + 4 + 1
"""The shortest entry of metadata."""
_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
"""The shortest entry of the directory."""
_MAX_KEY_LENGTH = 1 << 8
_MAX_NAME_LENGTH = 1 << 8
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """`shape` as torch has it, rows of whole blocks last; its bytes are `size` from byte `start` of the file on."""

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    start: int
    size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of numbers, along the last dimension."""
        return self.shape[-1] // self.kind.block * self.kind.block_bytes


class GgufFile:
    """Mapped as long as it, its metadata or a view of its bytes lives. Raises ModelError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _mapped(path)
        cursor = Cursor(path, self.data, len(MAGIC))
        _check_version(cursor)
        tensors, keys = cursor.u64(), cursor.u64()
        _check_count(cursor, tensors, MAX_TENSORS, _TENSOR_BYTES, "tensors")
        _check_count(cursor, keys, MAX_KEYS, _KEY_BYTES, "metadata entries")
        self.metadata = Metadata(path, self.data, _values(cursor, keys))
        self.tensors = self._directory(cursor, tensors)

    def bytes_of(self, tensor: StoredTensor) -> memoryview:
        """The stored bytes of a tensor of this file, mapped, not copied."""
        return memoryview(self.data)[tensor.start : tensor.start + tensor.size]

    def _directory(self, cursor: Cursor, count: int) -> dict[str, StoredTensor]:
        alignment = self.metadata.whole("general.alignment", _DEFAULT_ALIGNMENT) or 0
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.error(f"general.alignment is {alignment}, and must be a power of two up to {MAX_ALIGNMENT}")
        described = [_described(cursor) for _ in range(count)]
        base = -(-cursor.at // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for tensor in described:
            if tensor.name in found:
                raise cursor.error(f"it has two tensors {tensor.name}")
            if tensor.start % alignment:
                raise cursor.error(f"{tensor.name} is not aligned to {alignment} bytes")
            start = base + tensor.start
            if start + tensor.size > len(self.data):
                raise cursor.error(
                    f"{tensor.name} takes bytes {start} to {start + tensor.size}, and it ends at {len(self.data)}"
                )
            found[tensor.name] = StoredTensor(
                name=tensor.name, shape=tensor.shape, kind=tensor.kind, start=start, size=tensor.size
            )
        _check_overlap(cursor, list(found.values()))
        return found


def _mapped(path: Path) -> mmap.mmap:
    """Map the file, read-only to other processes: what is written to the mapping is private to it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic = file.read(len(MAGIC))
            if size >= _HEAD_BYTES and magic == MAGIC:
                # torch takes only memory that may be written to.
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"cannot read {path}", why=why, todo="check the path") from error
    why = f"it has {size} bytes" if size < _HEAD_BYTES else f"it begins with {magic!r}, not {MAGIC!r}"
    raise ModelError(f"{path} is not a GGUF file", why=why, todo="give a GGUF file, or download it again")


def _check_version(cursor: Cursor) -> None:
    version = cursor.u32()
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    is_big = swapped in VERSIONS
    why = "it is of a big-endian machine" if is_big else f"it is of version {version}, and 2 and 3 are read"
    raise ModelError(f"{cursor.path} cannot be read as GGUF", why=why, todo="convert the model again")


def _check_count(cursor: Cursor, count: int, most: int, each_bytes: int, what: str) -> None:
    if count > most or count * each_bytes > cursor.left:
        raise cursor.error(f"it says that it has {count} {what}")


def _values(cursor: Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.name(_MAX_KEY_LENGTH, "a metadata key")
        if key in values:
            raise cursor.error(f"it has {key} twice")
        values[key] = cursor.value(key)
    return values


def _described(cursor: Cursor) -> StoredTensor:
    """Read an entry of the directory; its `start` counts from where tensors begin."""
    name = cursor.name(_MAX_NAME_LENGTH, "the name of a tensor")
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{name} has {dimensions} dimensions, and 1 to {MAX_DIMENSIONS} are read")
    shape = tuple(reversed([cursor.u64() for _ in range(dimensions)]))
    number, start = cursor.u32(), cursor.u64()
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise ModelError(
            f"{cursor.path} cannot be read as GGUF", why=f"{name} is of type {number}, which is unknown",
            todo="use a file with another quantisation",
        )  # fmt: skip
    if 0 in shape or shape[-1] % kind.block:
        raise cursor.error(f"{name} is {list(shape)}, and a row of {kind.name} has blocks of {kind.block} numbers")
    return StoredTensor(
        name=name, shape=shape, kind=kind, start=start, size=prod(shape) // kind.block * kind.block_bytes
    )


def _check_overlap(cursor: Cursor, tensors: list[StoredTensor]) -> None:
    tensors.sort(key=lambda tensor: tensor.start)
    for first, second in itertools.pairwise(tensors):
        if first.start + first.size > second.start:
            raise cursor.error(f"{first.name} and {second.name} share bytes")
