"""Where a slice of blocks lies in a pool, in bytes, and the checks that come before any byte is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """A contiguous pool `[num_blocks, layers, planes, heads, block_tokens, row_bytes]`; a row is one token's bytes.

    The products are kept, for every frame of a transfer asks for them.
    """

    num_blocks: int
    layers: int
    planes: int
    heads: int
    block_tokens: int
    row_bytes: int

    head_bytes: int = field(init=False)
    plane_bytes: int = field(init=False)
    layer_bytes: int = field(init=False)
    block_bytes: int = field(init=False)
    pool_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        size = self.block_tokens * self.row_bytes
        for name, factor in (
            ("head_bytes", 1), ("plane_bytes", self.heads), ("layer_bytes", self.planes), ("block_bytes", self.layers),
            ("pool_bytes", self.num_blocks),
        ):  # fmt: skip
            size *= factor
            object.__setattr__(self, name, size)

    def first(self, layers: range, heads: range) -> int:
        """Offset of a slice inside its block."""
        return layers.start * self.layer_bytes + heads.start * self.head_bytes

    def payload_bytes(self, blocks: int, layers: range, heads: range) -> int:
        return blocks * len(layers) * self.planes * len(heads) * self.head_bytes


def is_within(part: range, size: int) -> bool:
    """True if `part` is a non-empty run of step 1 inside 0 … size - 1."""
    return part.step == 1 and 0 <= part.start < part.stop <= size


def check_slice(
    shape: PoolShape, pool_bytes: int, blocks: Sequence[int], layers: range, heads: range, payload: int
) -> None:
    """Raise ValueError unless the slice lies in the pool and `payload` has its size."""
    check_place(shape, pool_bytes, blocks, layers, heads)
    expected = shape.payload_bytes(len(blocks), layers, heads)
    if payload != expected:
        raise ValueError(f"a buffer of {payload} bytes for a slice of {expected}")


def check_place(shape: PoolShape, pool_bytes: int, blocks: Sequence[int], layers: range, heads: range) -> None:
    """Raise ValueError unless blocks, layers and heads lie in a pool of `pool_bytes`."""
    if pool_bytes < shape.pool_bytes:
        raise ValueError(f"{pool_bytes} bytes hold no {shape.num_blocks} blocks of {shape.block_bytes}")
    if not is_within(layers, shape.layers) or not is_within(heads, shape.heads):
        raise ValueError(f"layers {layers} or heads {heads} lie outside the pool")
    if blocks and not 0 <= min(blocks) <= max(blocks) < shape.num_blocks:
        raise ValueError(f"blocks {min(blocks)} to {max(blocks)} lie outside the pool's {shape.num_blocks}")
