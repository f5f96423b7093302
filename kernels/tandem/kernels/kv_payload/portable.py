"""Copies and re-blocking in Python and zlib: the specification of the C path, and its fallback, by the same names."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from tandem.kernels.kv_payload.shape import PoolShape


def move(
    name: str, pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range,
    payload: memoryview,
) -> int:  # fmt: skip
    """See `kv_payload.gather` and `scatter`. The checksum is of the written bytes: a payload's sender may still write
    its memory."""
    at = crc = 0
    for start, size in _runs(shape, blocks, layers, heads):
        ours, theirs = pool[start : start + size], payload[at : at + size]
        target, source = (theirs, ours) if name == "gather" else (ours, theirs)
        target[:] = source
        crc = zlib.crc32(target, crc)
        at += size
    return crc


def copy(source: memoryview, target: memoryview) -> int:
    """See `kv_payload.copy`."""
    target.cast("B")[:] = source.cast("B")
    return zlib.crc32(target)


def reblock(
    pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, out: memoryview,
    *, offset_tokens: int, target_tokens: int, targets: int,
) -> int:  # fmt: skip
    """See `kv_payload.reblock`."""
    at, row = 0, shape.row_bytes
    for target in range(targets):
        first = offset_tokens + target * target_tokens
        for layer in layers:
            for plane in range(shape.planes):
                for head in heads:
                    base = layer * shape.layer_bytes + plane * shape.plane_bytes + head * shape.head_bytes
                    token, end = first, first + target_tokens
                    while token < end:
                        index, inside = divmod(token, shape.block_tokens)
                        tokens = min(end - token, shape.block_tokens - inside)
                        size = tokens * row
                        if index < len(blocks):
                            start = blocks[index] * shape.block_bytes + base + inside * row
                            out[at : at + size] = pool[start : start + size]
                        else:
                            out[at : at + size] = bytes(size)
                        token, at = token + tokens, at + size
    return zlib.crc32(out)


def _runs(shape: PoolShape, blocks: Sequence[int], layers: range, heads: range) -> Iterator[tuple[int, int]]:
    """(offset, size) of the slice's contiguous runs in payload order."""
    first = shape.first(layers, heads)
    if len(heads) == shape.heads:
        for block in blocks:
            yield block * shape.block_bytes + first, len(layers) * shape.layer_bytes
        return
    size = len(heads) * shape.head_bytes
    for block in blocks:
        for layer in range(len(layers)):
            for plane in range(shape.planes):
                yield block * shape.block_bytes + first + layer * shape.layer_bytes + plane * shape.plane_bytes, size
