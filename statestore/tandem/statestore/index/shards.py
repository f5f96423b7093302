"""The entries of one KV group, spread over small dictionaries by the first byte of the hash.

One dictionary of millions of entries blocks for 100 ms when it grows, takes twice its memory while it does, and never
gives the room of deleted entries back. Small ones grow in a millisecond and are packed one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

from tandem.core.block_hash import HASH_BYTES, BlockHash

FIRST_BYTES = 256


def allocated_bytes(one: object) -> int:
    """Memory that an object takes: objects are allocated in steps of 16 bytes."""
    return (sys.getsizeof(one) + 15) // 16 * 16


_KEY_BYTES = allocated_bytes(bytes(HASH_BYTES))


class Shards:
    """`of[first byte]` is the dictionary of all hashes that begin with it, block → mask."""

    numbers = range(FIRST_BYTES)
    """For each dictionary, an index into `of`."""

    def __init__(self) -> None:
        self.of: list[dict[BlockHash, int]] = [{} for _ in self.numbers]

    def __len__(self) -> int:
        return sum(map(len, self))

    def __iter__(self) -> Iterator[dict[BlockHash, int]]:
        return iter(self.of)

    def memory_bytes(self, mask_bytes: int) -> int:
        """Memory of all entries, if each has a mask of its own of `mask_bytes`."""
        return sum(self.shard_bytes(index, mask_bytes) for index in self.numbers)

    def shard_bytes(self, index: int, mask_bytes: int) -> int:
        """Memory of one dictionary and its entries."""
        shard = self.of[index]
        return sys.getsizeof(shard) + len(shard) * (_KEY_BYTES + mask_bytes)

    def evict(self, index: int) -> int:
        """Drop the oldest entries of one dictionary, about a tenth, and pack the rest; returns how many went.

        The part differs between dictionaries, so that they do not fill up again all at once.
        """
        shard = self.of[index]
        oldest = list(islice(shard, -(-len(shard) // (7 + index % 8))))
        for block in oldest:
            del shard[block]
        # A dictionary keeps the room of what was deleted; its copy has none, and is no larger than it must be.
        packed: dict[BlockHash, int] = {}
        packed.update(shard)
        self.of[index] = packed
        return len(oldest)
