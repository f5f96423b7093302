"""Block table in memory, of the blocks that each worker holds: block hash → bitmask of slots.

    slot = one bit = one complete or growing copy of one worker's set

A worker's copy is filled in a fresh slot and goes live in one step; dropping a worker is one step too: its bit leaves
the mask of live slots, and a sweep clears it from the entries later, after which the bit is used again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tandem.core.block_hash import HASH_BYTES, BlockHash
from tandem.core.ids import WorkerId

FIRST_BYTES = 256
_MAX_SHARED_MASKS = 16_384
_JUMP = 16
"""Blocks that a lookup jumps ahead at once."""
_CHECK_BLOCKS = 256
"""Blocks that may be added before memory is checked again; meanwhile a few of the dictionaries may grow."""


def allocated_bytes(one: object) -> int:
    """Memory that an object takes: objects are allocated in steps of 16 bytes."""
    return (sys.getsizeof(one) + 15) // 16 * 16


_KEY_BYTES = allocated_bytes(bytes(HASH_BYTES))


class Shards:
    """Entries of one KV group: `of[first byte]` is the dictionary of all hashes that begin with it, block → mask.

    One dictionary of millions of entries blocks for 100 ms when it grows, takes twice its memory while it does, and
    never gives the room of deleted entries back. Small ones grow in a millisecond and are packed one at a time.
    """

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


class BlockTable:
    """Bounded by `max_bytes` over all groups; past it the oldest blocks go. Not thread-safe.

    The bound covers hashes, dictionaries and masks. The dictionaries are many small ones, which grow, shrink and are
    swept one at a time, so that no call takes long.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._groups: dict[int, Shards] = {0: Shards()}
        self._owners: dict[int, WorkerId] = {}  # live bit → worker
        self._live = 0  # bits that lookups see
        self._open = 0  # live bits and those being filled
        self._dead = 0  # bits that may still stand in entries
        self._sweeping = 0  # the dead bits that the current sweep clears
        self._to_sweep: list[tuple[Shards, int]] = []
        self._swept: tuple[Shards, int] = (self._groups[0], 0)
        self._keys_to_sweep: list[BlockHash] = []  # of the dictionary in `_swept`
        self._masks: dict[int, int] = {}  # equal masks share one object: less memory, fewer cache misses
        self._mask_bytes = 0  # of one that may stand in a single entry
        self._unchecked = 0
        self._bounded = 0  # dictionaries that were kept to their bound last
        self.evicted = 0

    @property
    def entries(self) -> int:
        """Blocks in the table, over all groups."""
        return sum(map(len, self._groups.values()))

    @property
    def memory_bytes(self) -> int:
        """Memory of all entries."""
        return sum(shards.memory_bytes(self._mask_bytes) for shards in self._groups.values())

    def open_slot(self) -> int:
        """A fresh slot that lookups do not see yet; returns its bit."""
        used = self._open | self._dead
        bit = ~used & (used + 1)  # the lowest bit not in use
        self._open |= bit
        return bit

    def go_live(self, bit: int, worker: WorkerId) -> None:
        """Lookups see the slot from now on, as `worker`."""
        self._owners[bit] = worker
        self._live |= bit

    def close_slot(self, bit: int) -> None:
        """Hide the slot from lookups from now on; `sweep` clears its bit."""
        self._owners.pop(bit, None)
        self._live &= ~bit
        self._open &= ~bit
        self._dead |= bit

    def add(self, bit: int, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        """Mark (group, hash) blocks as held by the slot. Idempotent."""
        groups, keep, share = self._groups, self._open, self._masks.setdefault
        if len(self._masks) > _MAX_SHARED_MASKS:
            self._masks.clear()
            self._mask_bytes = allocated_bytes(self._open | self._dead)  # from now on, equal ones may be many objects
        count = 0
        for count, (group, block) in enumerate(blocks, 1):  # noqa: B007 - the last one is wanted
            shards = groups.get(group)
            if shards is None:
                shards = groups[group] = Shards()
            shard = shards.of[block[0]]
            mask = shard.get(block, 0) & keep | bit
            shard[block] = share(mask, mask)
        self._unchecked += count
        if self._unchecked >= _CHECK_BLOCKS:
            self._bound(self._unchecked)
            self._unchecked = 0

    def remove(self, bit: int, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        """Unmark blocks of the slot. Idempotent."""
        keep = self._open & ~bit
        for group, block in blocks:
            shards = self._groups.get(group)
            if shards is not None:
                self._reduce(shards.of[block[0]], block, keep)

    def lookup(self, hashes: Sequence[BlockHash], group: int = 0) -> dict[WorkerId, int]:
        """Return the number of leading blocks of `hashes` that each worker holds; workers with none are left out.

        Workers give up the last blocks of a prompt first, so a worker that holds a block holds those before it: a
        lookup jumps, and searches where a worker drops out. A block that a worker lacks within a jump, against this
        rule, is not seen. Each block that is looked at has to come from memory, and that is all that a lookup of a
        large table waits for.
        """
        running, found = self._live, dict[WorkerId, int]()
        shards = self._groups.get(group)
        if shards is None or not running or not hashes:
            return found
        of, low, high, last = shards.of, 0, 0, len(hashes) - 1  # the workers in `running` hold all below `low`
        while low <= last:
            block = hashes[high]
            if of[block[0]].get(block, 0) & running == running:
                low, high = high + 1, min(high + _JUMP, last)
                continue
            end = _first_without(of, hashes, range(low, high), running)
            block = hashes[end]
            still = of[block[0]].get(block, 0) & running
            if end:
                self._record(found, running & ~still, end)
            if not still:
                return found
            running, low = still, end
        self._record(found, running, len(hashes))
        return found

    def sweep(self, budget: int) -> bool:
        """Clear dead bits out of up to `budget` entries; True while more is to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping = self._dead
            self._to_sweep = [(shards, index) for shards in self._groups.values() for index in shards.numbers]
        keep = ~self._sweeping
        while budget > 0 and (self._keys_to_sweep or self._to_sweep):
            if not self._keys_to_sweep:
                shards, index = self._swept = self._to_sweep.pop()
                self._keys_to_sweep = list(shards.of[index])
            chunk = self._keys_to_sweep[-budget:]
            del self._keys_to_sweep[-budget:]
            budget -= max(1, len(chunk))
            shards, index = self._swept
            shard = shards.of[index]
            for block in chunk:
                self._reduce(shard, block, keep)
        if not self._keys_to_sweep and not self._to_sweep:
            self._dead &= keep
            self._sweeping = 0
        return bool(self._sweeping or self._dead)

    def blocks_of(self, worker: WorkerId) -> set[tuple[int, BlockHash]]:
        """Everything that `worker` is believed to hold; walks the whole table (for audits and tests)."""
        bits = sum(bit for bit, owner in self._owners.items() if owner == worker)
        return {
            (group, block)
            for group, shards in self._groups.items()
            for shard in shards
            for block, mask in shard.items()
            if mask & bits
        }

    @property
    def parts(self) -> int:
        """Number of dictionaries that a group is spread over."""
        return len(self._groups[0].numbers)

    def unique_in(self, part: int, group: int = 0) -> Counter[WorkerId]:
        """Number of blocks of one dictionary of a group that each worker holds alone."""
        shards, found = self._groups.get(group), Counter[WorkerId]()
        for mask, count in Counter(shards.of[part].values()).items() if shards is not None else ():
            live = mask & self._live
            if live and not live & (live - 1):
                found[self._owners[live]] += count
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself; walks the whole table."""
        known = self._open | self._dead
        for shards in self._groups.values():
            for shard in shards:
                assert all(mask and not mask & ~known for mask in shard.values()), (
                    "an entry has no bit or an unknown one"
                )
                assert all(shards.of[block[0]] is shard for block in shard), "a block is in the wrong shard"
        assert not self._live & ~self._open, "a live slot is not open"
        assert not self._open & self._dead, "a slot is open and dead"
        assert sum(self._owners) == self._live, "live slots and owners differ"

    def _record(self, found: dict[WorkerId, int], bits: int, depth: int) -> None:
        while bits:
            bit = bits & -bits
            found[self._owners[bit]] = depth
            bits ^= bit

    def _reduce(self, shard: dict[BlockHash, int], block: BlockHash, keep: int) -> None:
        """Keep only these bits of an entry; drop it if none is left."""
        mask = shard.get(block, 0)
        rest = mask & keep
        if rest and rest != mask:
            shard[block] = self._masks.setdefault(rest, rest)
        elif mask and not rest:
            del shard[block]

    def _bound(self, added: int) -> None:
        """Keep to `max_bytes`, but drop no more than `added` requires: the rest has time.

        Blocks spread evenly over the dictionaries, so each may have its part of the memory.
        """
        groups = list(self._groups.values())
        limit = self._max_bytes // len(groups[0].numbers)
        for _ in groups[0].numbers:
            index = self._bounded
            while added > 0 and sum(shards.shard_bytes(index, self._mask_bytes) for shards in groups) > limit:
                evicted = max(groups, key=lambda shards: len(shards.of[index])).evict(index)
                if not evicted:
                    break
                self.evicted += evicted
                added -= evicted
            if added <= 0:
                return
            self._bounded = (index + 1) % len(groups[0].numbers)


def _first_without(of: list[dict[BlockHash, int]], hashes: Sequence[BlockHash], among: range, running: int) -> int:
    """The first position that one of `running` does not hold, or the one after `among`, which is one."""
    low, high = among.start, among.stop
    while low < high:
        middle = (low + high) // 2
        block = hashes[middle]
        if of[block[0]].get(block, 0) & running == running:
            low = middle + 1
        else:
            high = middle
    return low
