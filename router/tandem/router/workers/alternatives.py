"""The alternatives of a token in little memory: an answer that is not streamed holds half a million of them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

_ONE = struct.Struct("<If")


class Alternatives(Sequence[tuple[int, float]]):
    """(token id, logprob) of each, as they came over the wire; a tenth of what tuples take. Logprobs are float32."""

    __slots__ = ("_packed",)

    def __init__(self, top: Sequence[tuple[int, float]]) -> None:
        self._packed = struct.pack(f"<{'If' * len(top)}", *chain.from_iterable(top))

    def __len__(self) -> int:
        return len(self._packed) // _ONE.size

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return _ONE.iter_unpack(self._packed)

    @overload
    def __getitem__(self, place: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[tuple[int, float]]: ...
    def __getitem__(self, place: int | slice) -> tuple[int, float] | Sequence[tuple[int, float]]:
        return tuple(self)[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Iterable) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
