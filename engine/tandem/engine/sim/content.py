"""A 64-bit number as KV elements: eight floats of the form ±(1 + m/128), a byte each, repeated over the width.

These values are exact in float32, bfloat16 and float16, so a transfer that converts carries them unharmed; zeroed
memory is none of them. A lossy codec (int8, fp8) rounds them: such a block counts as broken, the answer changes.
Encoding is affine over GF(2): `encode(a ^ b) == encode(a) ^ linear(b)`, and so are CRCs over it.
"""

from __future__ import annotations

from tandem.core.errors import ConfigError
from tandem.core.kv_layout import DTYPE_BYTES

ELEMENTS = 8
"""Elements that hold one number."""


class Encoding:
    """Numbers as `width` elements of `dtype`. Raises ConfigError for a width that cannot hold one, or another dtype."""

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
