"""Writes the bytes of a GGUF file by hand, right or wrong in any place."""

import struct
from dataclasses import dataclass, field

TEXT, ARRAY, U32, F32 = 8, 9, 4, 6


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_text(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", TEXT) + text(value)


def key_u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def key_array(key: str, kind: int, count: int, elements: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + elements


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@dataclass(kw_only=True)
class Bytes:
    """A file of these entries; counts are theirs unless given."""

    magic: bytes = b"GGUF"
    version: int = 3
    keys: list[bytes] = field(default_factory=lambda: [key_text("general.architecture", "llama")])
    tensors: list[bytes] = field(default_factory=lambda: [tensor("token_embd.weight", (4, 2))])
    key_count: int | None = None
    tensor_count: int | None = None
    data: bytes = bytes(32)
    alignment: int = 32

    def made(self) -> bytes:
        keys = len(self.keys) if self.key_count is None else self.key_count
        tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        head = self.magic + struct.pack("<IQQ", self.version, tensors, keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data
