"""Mutations of a GGUF file: bits that flip, wrong lengths, pieces that are gone, twice or of another file."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

_NUMBERS = (0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
Mutate = Callable[[random.Random, bytearray, int], None]
"""Changes a file in place, mostly in its first so many bytes: metadata and the directory of tensors."""


def _flip(drawn: random.Random, file: bytearray, head: int) -> None:
    for _ in range(drawn.randint(1, 8)):
        file[_place(drawn, file, head)] ^= 1 << drawn.randrange(8)


def _number(drawn: random.Random, file: bytearray, head: int) -> None:
    at, layout = _place(drawn, file, head), drawn.choice("IQ")
    size = struct.calcsize(layout)
    file[at : at + size] = struct.pack(f"<{layout}", drawn.choice(_NUMBERS) & ((1 << 8 * size) - 1))


def _length(drawn: random.Random, file: bytearray, head: int) -> None:
    """Change the length of a text: one is before a letter that follows three zeros."""
    for _ in range(100):
        at = _place(drawn, file, head)
        if at > 8 and file[at - 3 : at] == bytes(3) and 32 < file[at] < 127:
            file[at - 8 : at] = struct.pack("<Q", drawn.choice(_NUMBERS))
            return


def _cut(drawn: random.Random, file: bytearray, head: int) -> None:
    del file[_place(drawn, file, head) :]


def _gone(drawn: random.Random, file: bytearray, head: int) -> None:
    at = _place(drawn, file, head)
    del file[at : at + drawn.randint(1, 200)]


def _twice(drawn: random.Random, file: bytearray, head: int) -> None:
    at, length = _place(drawn, file, head), drawn.randint(1, 400)
    file[at:at] = file[at : at + length]


def _moved(drawn: random.Random, file: bytearray, head: int) -> None:
    length, source, target = drawn.randint(1, 64), _place(drawn, file, head), _place(drawn, file, head)
    file[target : target + length] = file[source : source + length]


def _noise(drawn: random.Random, file: bytearray, head: int) -> None:
    at, length = _place(drawn, file, head), drawn.randint(1, 64)
    file[at : at + length] = drawn.randbytes(length)


def _counts(drawn: random.Random, file: bytearray, _head: int) -> None:
    file[8:24] = struct.pack("<QQ", drawn.choice(_NUMBERS), drawn.choice(_NUMBERS))


MUTATIONS: dict[str, Mutate] = {
    "flip": _flip, "number": _number, "length": _length, "cut": _cut, "gone": _gone, "twice": _twice,
    "moved": _moved, "noise": _noise, "counts": _counts,
}  # fmt: skip


def mutate(drawn: random.Random, file: bytearray, head: int) -> str:
    """Apply one to three mutations; returns their names."""
    names = [drawn.choice(list(MUTATIONS)) for _ in range(drawn.choice((1, 1, 2, 3)))]
    for name in names:
        if len(file) > 64:
            MUTATIONS[name](drawn, file, min(head, len(file)))
    return "+".join(names)


def _place(drawn: random.Random, file: bytearray, head: int) -> int:
    """A random position; nine in ten are in the head."""
    return drawn.randrange(4, head if drawn.random() < 0.9 else len(file))
