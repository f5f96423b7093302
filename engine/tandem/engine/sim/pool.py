"""One KV group on one rank: hashes written into the slots of every layer, plane and head, and blocks judged by them.

A block is *good* if all its slots hold the same hashes in their own disguise. A good block counts with its hashes; any
other with checksums of its bytes, so that one wrong bit anywhere gives another digest.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from zlib import crc32

from tandem.core.errors import ConfigError
from tandem.core.kv_layout import DTYPE_BYTES, KVGroupSpec
from tandem.engine.sim.arithmetic import BASE, PRIME, START, fold, mix

ELEMENTS = 8
"""Elements that hold one number."""


class SimPool:
    """`[num_blocks, group_layers, planes, heads_local, block_tokens, width]` as anonymous memory, zeroed when touched.

    `data` is the whole pool as writable bytes. Raises ConfigError or ValueError for shapes that cannot be simulated.
    """

    def __init__(self, spec: KVGroupSpec, num_blocks: int, *, tp: int = 1, rank: int = 0) -> None:
        if spec.window is not None:
            raise ValueError("the simulated engine has no sliding windows")
        self.spec, self.num_blocks = spec, num_blocks
        self.data = memoryview(mmap.mmap(-1, num_blocks * spec.block_bytes(tp)))
        self._encoding = Encoding(spec.dtype, spec.width)
        self._block_bytes, self._layer_bytes, self._head_bytes = (
            spec.block_bytes(tp), spec.layer_bytes(tp), spec.head_bytes()
        )  # fmt: skip
        self._slot_bytes = self._encoding.slot_bytes
        heads = spec.heads_of(rank, tp)
        self._disguises = [
            _disguise(layer, plane, head) for layer in spec.layers for plane in range(spec.planes) for head in heads
        ]
        self._rows_of_layer = spec.planes * len(heads)
        self._keys: dict[int, list[int]] = {}
        self._checks: dict[int, list[int]] = {}
        self._judged: dict[int, int] = {}
        self._full_step = pow(BASE, spec.block_tokens, PRIME)

    def hash_at(self, table: Sequence[int], position: int) -> int:
        """The hash in the slot of `position`, as its first head holds it; START before the first token."""
        if position < 0:
            return START
        place, offset = divmod(position, self.spec.block_tokens)
        at = self._start(table[place]) + offset * self._slot_bytes
        slot = self.data[at : at + self._slot_bytes]
        number = self._encoding.decode(slot)
        return mix(crc32(slot), 0) if number is None else number ^ self._disguises[0]

    def write(self, table: Sequence[int], position: int, hashes: Sequence[int], layers: range) -> None:
        """Fill the slots from `position` on, in the group's own `layers`."""
        size, done = self.spec.block_tokens, 0
        while done < len(hashes):
            place, offset = divmod(position + done, size)
            part = hashes[done : done + size - offset]
            self._write_block(self._start(table[place]), offset, part, layers)
            done += len(part)

    def digest(self, table: Sequence[int], tokens: int) -> int:
        """The digest of the first `tokens` tokens, from every byte of their slots."""
        full, rest = divmod(tokens, self.spec.block_tokens)
        value, data, size, step, judged = 0, self.data, self._block_bytes, self._full_step, self._judged
        for block in table[:full]:
            start = self._start(block)
            check = crc32(data[start : start + size])
            part = judged.get(check)
            if part is None:
                part = self._remember(check, self._judge(start, self.spec.block_tokens))
            value = (value * step + part) % PRIME
        if rest:
            value = (value * pow(BASE, rest, PRIME) + self._judge(self._start(table[full]), rest)) % PRIME
        return value

    def copy(self, source: int, target: int) -> None:
        """Copy a whole block."""
        a, b, size = self._start(source), self._start(target), self._block_bytes
        self.data[b : b + size] = self.data[a : a + size]

    def _start(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} lies outside the pool's {self.num_blocks}")
        return block * self._block_bytes

    def _write_block(self, start: int, offset: int, hashes: Sequence[int], layers: range) -> None:
        length, size, data = len(hashes) * self._slot_bytes, self._head_bytes, self.data
        plain = int.from_bytes(b"".join([self._encoding.encode(each) for each in hashes]), "little")
        keys = self._keys.get(len(hashes)) or self._new_keys(len(hashes))
        at = start + layers.start * self._layer_bytes + offset * self._slot_bytes
        for key in keys[layers.start * self._rows_of_layer : layers.stop * self._rows_of_layer]:
            data[at : at + length] = (plain ^ key).to_bytes(length, "little")
            at += size

    def _judge(self, start: int, tokens: int) -> int:
        """Contribution of a block's first `tokens` tokens to the digest of a context."""
        data, size, length = self.data, self._slot_bytes, tokens * self._slot_bytes
        end = start + self._block_bytes
        checks = [crc32(data[at : at + length]) for at in range(start, end, self._head_bytes)]
        found = [self._encoding.decode(data[at : at + size]) for at in range(start, start + length, size)]
        hashes = [number ^ self._disguises[0] for number in found if number is not None]
        if len(hashes) == tokens:
            plain = crc32(b"".join([self._encoding.encode(each) for each in hashes]))
            if checks == [plain ^ check for check in self._check(tokens)]:
                return fold(0, hashes)
        value = tokens
        for check in checks:
            value = mix(value, check)
        return value % PRIME

    def _remember(self, check: int, value: int) -> int:
        """Equal bytes are judged once: a full block's verdict is kept under its checksum."""
        if len(self._judged) > 4 * self.num_blocks:
            self._judged.clear()
        self._judged[check] = value
        return value

    def _new_keys(self, tokens: int) -> list[int]:
        """For every layer, plane and head: its disguise of `tokens` slots, as a number to xor with."""
        keys = [int.from_bytes(self._encoding.linear(disguise) * tokens, "little") for disguise in self._disguises]
        self._keys[tokens] = keys
        return keys

    def _check(self, tokens: int) -> list[int]:
        """For every layer, plane and head: the change by its disguise in the CRC over `tokens` slots."""
        checks = self._checks.get(tokens)
        if checks is None:
            zero = crc32(bytes(tokens * self._slot_bytes))
            checks = [crc32(self._encoding.linear(disguise) * tokens) ^ zero for disguise in self._disguises]
            self._checks[tokens] = checks
        return checks


def _disguise(layer: int, plane: int, head: int) -> int:
    return mix(mix(mix(0x5349_4D, layer), plane), head)


class Encoding:
    """64-bit numbers as KV elements: eight floats of the form ±(1 + m/128), a byte each, repeated over the width.

    These values are exact in float32, bfloat16 and float16, so a transfer that converts carries them unharmed; zeroed
    memory is none of them. A lossy codec (int8, fp8) rounds them: such a block counts as broken, the answer changes.
    Encoding is affine over GF(2): `encode(a ^ b) == encode(a) ^ linear(b)`, and so are CRCs over it. Raises ConfigError
    for a width that cannot hold a number, or another dtype.
    """

    def __init__(self, dtype: str, width: int) -> None:
        if dtype not in _BITS:
            raise ConfigError(f"the simulated engine has no KV in {dtype}", todo=f"use {', '.join(_BITS)}")
        if width < ELEMENTS:
            raise ConfigError(
                f"the simulated engine cannot fill heads of width {width}", why=f"a slot needs {ELEMENTS} elements",
                todo="use a model whose heads are at least that wide",
            )  # fmt: skip
        bits, self.element_bytes = _BITS[dtype], DTYPE_BYTES[dtype]
        self.number_bytes = ELEMENTS * self.element_bytes
        self.slot_bytes = width * self.element_bytes
        self._repeats = -(-width // ELEMENTS)
        self._elements = [bits(byte).to_bytes(self.element_bytes, "little") for byte in range(256)]
        self._bytes = {element: byte for byte, element in enumerate(self._elements)}

    def encode(self, number: int) -> bytes:
        """One slot: `slot_bytes` bytes."""
        elements = self._elements
        once = b"".join([elements[byte] for byte in number.to_bytes(ELEMENTS, "little")])
        return (once * self._repeats)[: self.slot_bytes]

    def decode(self, slot: memoryview) -> int | None:
        """The number at the beginning of a slot; None if these elements hold none. Does not look at the repetitions."""
        raw, size, known = bytes(slot[: self.number_bytes]), self.element_bytes, self._bytes
        try:
            found = [known[raw[at : at + size]] for at in range(0, self.number_bytes, size)]
        except KeyError:
            return None
        return int.from_bytes(bytes(found), "little")

    def linear(self, number: int) -> bytes:
        """The change of `encode` when its number is xored with this one."""
        zero = int.from_bytes(self.encode(0), "little")
        return (int.from_bytes(self.encode(number), "little") ^ zero).to_bytes(self.slot_bytes, "little")


def _bfloat16(byte: int) -> int:
    return byte >> 7 << 15 | 127 << 7 | byte & 127


def _float16(byte: int) -> int:
    return byte >> 7 << 15 | 15 << 10 | (byte & 127) << 3


def _float32(byte: int) -> int:
    return _bfloat16(byte) << 16


_BITS = {"float32": _float32, "bfloat16": _bfloat16, "float16": _float16}
