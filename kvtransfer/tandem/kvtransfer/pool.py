"""One KV group's pool on one rank, seen as bytes: gather slices of blocks out of it, scatter them back into it.

Knows the layout of `tandem.core.kvlayout` and nothing of transfers. Blocks, layers and heads are indices local to the
pool: layer 0 is the group's first layer, head 0 the first head that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tandem.core.ids import BlockId
from tandem.core.kvlayout import KVGroupSpec


class PoolAccess(Protocol):
    """Byte access to a pool, from transfer threads. A payload is `[blocks, layers, planes, heads, tokens, width]`."""

    @property
    def spec(self) -> KVGroupSpec: ...

    @property
    def tp(self) -> int: ...

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> None:
        """Gather the named slices into `out`, which has exactly their size."""
        ...

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> None:
        """Scatter `payload`, which has exactly the slices' size. Every block is in range, else nothing is written."""
        ...


class HostPool:
    """A pool in host memory; `data` is the whole of it, borrowed for this object's life, contiguous.

    Thread-safe as far as two calls touch different slices. Raises ValueError for a size or index that does not fit.
    """

    def __init__(self, spec: KVGroupSpec, tp: int, data: memoryview) -> None:
        self._data = data.cast("B")
        self._spec, self._tp = spec, tp
        self._heads = spec.heads_local(tp)
        self._head_bytes = spec.head_bytes()
        self._layer_bytes = spec.layer_bytes(tp)
        self._block_bytes = spec.block_bytes(tp)
        if len(self._data) % self._block_bytes:
            raise ValueError(f"{len(self._data)} bytes are no whole number of {self._block_bytes}-byte blocks")
        self.num_blocks = len(self._data) // self._block_bytes

    @property
    def spec(self) -> KVGroupSpec:
        return self._spec

    @property
    def tp(self) -> int:
        return self._tp

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> None:
        """Gather into `out`."""
        self._check(blocks, layers, heads, len(out))
        data, at = self._data, 0
        for start, size in self._runs(blocks, layers, heads):
            out[at : at + size] = data[start : start + size]
            at += size

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> None:
        """Scatter `payload`."""
        self._check(blocks, layers, heads, len(payload))
        data, at = self._data, 0
        for start, size in self._runs(blocks, layers, heads):
            data[start : start + size] = payload[at : at + size]
            at += size

    def _check(self, blocks: Sequence[BlockId], layers: range, heads: range, size: int) -> None:
        if not is_within(layers, len(self._spec.layers)) or not is_within(heads, self._heads):
            raise ValueError(f"layers {layers} or heads {heads} lie outside the pool")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)} lie outside the pool's {self.num_blocks}")
        expected = payload_bytes(self._spec, len(blocks), layers, heads)
        if size != expected:
            raise ValueError(f"a buffer of {size} bytes for a slice of {expected}")

    def _runs(self, blocks: Sequence[BlockId], layers: range, heads: range) -> Iterator[tuple[int, int]]:
        """(offset, size) of the slice's contiguous runs in payload order, neighbours joined."""
        start, size = 0, 0
        for offset, length in self._pieces(blocks, layers, heads):
            if offset == start + size:
                size += length
                continue
            if size:
                yield start, size
            start, size = offset, length
        if size:
            yield start, size

    def _pieces(self, blocks: Sequence[BlockId], layers: range, heads: range) -> Iterator[tuple[int, int]]:
        if len(heads) == self._heads:
            for block in blocks:
                yield block * self._block_bytes + layers.start * self._layer_bytes, len(layers) * self._layer_bytes
            return
        plane_bytes = self._heads * self._head_bytes
        first, length = heads.start * self._head_bytes, len(heads) * self._head_bytes
        for block in blocks:
            for layer in layers:
                base = block * self._block_bytes + layer * self._layer_bytes + first
                for plane in range(self._spec.planes):
                    yield base + plane * plane_bytes, length


def payload_bytes(spec: KVGroupSpec, blocks: int, layers: range, heads: range) -> int:
    """Bytes of a slice: blocks × layers × planes × heads × head bytes."""
    return blocks * len(layers) * spec.planes * len(heads) * spec.head_bytes()


def is_within(part: range, size: int) -> bool:
    """Whether `part` is a non-empty run of step 1 inside 0 … size - 1."""
    return part.step == 1 and 0 <= part.start < part.stop <= size
