"""KV layouts of the proof, their content drawn from a seed, and the oracle: what a rank's block must hold.

Content is `[layers, planes, heads, tokens, bytes of a row]` of one KV group, all heads. Slicing is numpy's, so the
oracle shares no code with the gather, scatter and re-blocking that it judges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.core.ids import GroupId
from tandem.core.kv_layout import DTYPE_BYTES, KVGroupSpec

Bytes = NDArray[np.uint8]
NUM_BLOCKS = 48
"""Blocks of every pool."""
BLOCK_TOKENS = (4, 8, 16, 24)
_GROUPS: dict[str, tuple[dict[str, Any], ...]] = {
    "dense": ({"layers": (0, 1, 2), "planes": 2, "heads": 4, "width": 8, "dtype": "float16"},),
    "few heads": ({"layers": (0, 1), "planes": 2, "heads": 2, "width": 16, "dtype": "bfloat16"},),
    "two groups": (
        {"layers": (0, 1), "planes": 2, "heads": 4, "width": 8, "dtype": "float16"},
        {"layers": (2, 3, 4), "planes": 2, "heads": 2, "width": 4, "dtype": "float32", "window": 64},
    ),
    "latent beside": (
        {"layers": (0, 1), "planes": 2, "heads": 4, "width": 8, "dtype": "float16"},
        {"layers": (2, 3), "planes": 1, "heads": 1, "width": 18, "dtype": "float32", "is_replicated": True},
    ),
    "latent": ({"layers": (0, 1), "planes": 1, "heads": 1, "width": 36, "dtype": "bfloat16", "is_replicated": True},),
    "wide": ({"layers": tuple(range(6)), "planes": 2, "heads": 4, "width": 64, "dtype": "float32"},),
}
SMALL = tuple(name for name in _GROUPS if name != "wide")


def specs_of(shape: str, block_tokens: int) -> tuple[KVGroupSpec, ...]:
    """The KV groups of a shape with blocks of that size."""
    return tuple(
        KVGroupSpec(group=GroupId(number), block_tokens=block_tokens, **fields)
        for number, fields in enumerate(_GROUPS[shape])
    )


def drawn(seed: str, spec: KVGroupSpec, tokens: int) -> Bytes:
    """Content of so many tokens; another one for every seed and group."""
    shape = len(spec.layers), spec.planes, spec.heads, tokens, spec.width * DTYPE_BYTES[spec.dtype]
    digest = hashlib.sha256(f"{seed}/{spec.group}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    return np.frombuffer(generator.bytes(int(np.prod(shape))), np.uint8).reshape(shape)


def view(memory: bytearray, spec: KVGroupSpec, tp: int) -> Bytes:
    """A pool's memory as `[blocks, layers, planes, heads_local, block_tokens, bytes of a row]`, writable."""
    row = spec.width * DTYPE_BYTES[spec.dtype]
    heads = spec.heads_local(tp)
    return np.frombuffer(memory, np.uint8).reshape(-1, len(spec.layers), spec.planes, heads, spec.block_tokens, row)


def in_blocks(content: Bytes, spec: KVGroupSpec, tp: int, rank: int, first: int, count: int) -> Bytes:
    """Content that `count` blocks from the logical block `first` on must have on a rank: its heads of the content, then
    zeros.

    `[count, layers, planes, heads_local, block_tokens, bytes of a row]`.
    """
    begin, end = first * spec.block_tokens, (first + count) * spec.block_tokens
    heads = spec.heads_of(rank, tp)
    part = content[:, :, heads.start : heads.stop, begin : min(end, content.shape[3])]
    missing = end - begin - part.shape[3]
    if missing:
        part = np.pad(part, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    layers, planes, held, _, row = part.shape
    return part.reshape(layers, planes, held, count, spec.block_tokens, row).transpose(3, 0, 1, 2, 4, 5)


def place(pool: Bytes, blocks: Sequence[int], content: Bytes) -> None:
    """Write blocks as `in_blocks` gives them."""
    if blocks:
        pool[np.asarray(blocks)] = content
