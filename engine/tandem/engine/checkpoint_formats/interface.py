"""The interface between the loader of weights and formats, and helpers of formats. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StoredSlice(Protocol):
    """A tensor of a checkpoint that is read when it is indexed, as safetensors' slices are."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class StoredFormat(Protocol):
    """A way of storing weights, with the settings of one checkpoint."""

    @property
    def words(self) -> str:
        """Its name and what it stores, for logs."""

    def weights(self, keys: Collection[str]) -> dict[str, dict[str, str]]:
        """Of a checkpoint with these keys, the weights that are stored so: key of each to the keys of its parts by
        name. All keys that are not parts stay tensors of their own."""

    def is_unused(self, key: str) -> bool:
        """True for tensors that plain weights do not need, such as scales of activations."""

    def open(self, key: str, parts: Mapping[str, StoredSlice]) -> StoredSlice:
        """The weight of `key` in fp32, `[rows, columns]`. Raises ValueError for parts that contradict each other."""


def packed_weights(
    keys: Collection[str], first: str, others: tuple[str, ...] = (), behind: str = ".weight"
) -> dict[str, dict[str, str]]:
    """Weights `NAME.weight` that have a tensor `NAME.first`, with those of `others` that are there."""
    found = {}
    for key in keys:
        name = key.removesuffix("." + first)
        if name != key:
            found[name + behind] = {part: f"{name}.{part}" for part in (first, *others) if f"{name}.{part}" in keys}
    return found


def need(parts: Mapping[str, StoredSlice], *names: str) -> list[StoredSlice]:
    """Parts of a weight by name. Raises ValueError where one is missing."""
    for name in names:
        if name not in parts:
            raise ValueError(f"its {name} is missing")
    return [parts[name] for name in names]


def matrix_shape(name: str, part: StoredSlice) -> tuple[int, int]:
    """Return the rows and columns of a part. Raises ValueError for other than two dimensions."""
    shape = part.get_shape()
    if len(shape) != 2:
        raise ValueError(f"its {name} must be a matrix, not {list(shape)}")
    return shape[0], shape[1]


def check_shape(name: str, part: StoredSlice, *shapes: list[int]) -> None:
    """Raises ValueError where `part` has none of these shapes."""
    if list(part.get_shape()) not in shapes:
        raise ValueError(f"its {name} must be {' or '.join(map(str, shapes))}, not {list(part.get_shape())}")
