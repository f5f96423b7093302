"""Which worker holds which block, in memory: block hash → bitmask of slots.

    slot = one bit = one complete or growing copy of one worker's set

A worker's copy is filled in a fresh slot and goes live in one step; dropping a worker is one step too: its bit leaves
the mask of live slots, and a sweep clears it from the entries later, after which the bit is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tandem.core.blockhash import BlockHash
from tandem.core.ids import WorkerId

ENTRY_BYTES = 120
"""About what one entry costs: hash object and dictionary slot (measured by bench/index_lookup)."""
_MAX_SHARED_MASKS = 65_536


class BlockTable:
    """Bounded by `max_entries` blocks over all groups; past it, a sixteenth goes, oldest first. Not thread-safe."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._groups: dict[int, dict[BlockHash, int]] = {0: {}}
        self._owners: dict[int, WorkerId] = {}  # live bit → worker
        self._live = 0  # bits that lookups see
        self._open = 0  # live bits and those being filled
        self._dead = 0  # bits that may still stand in entries
        self._sweeping = 0  # the dead bits that the current sweep clears
        self._groups_to_sweep: list[int] = []
        self._to_sweep: list[BlockHash] = []
        self._masks: dict[int, int] = {}  # equal masks share one object: less memory, fewer cache misses
        self.evicted = 0

    @property
    def entries(self) -> int:
        """Blocks in the table, over all groups."""
        return sum(map(len, self._groups.values()))

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
        """Nobody sees the slot from now on; its bit is cleared by `sweep`."""
        self._owners.pop(bit, None)
        self._live &= ~bit
        self._open &= ~bit
        self._dead |= bit

    def add(self, bit: int, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        """Mark (group, hash) blocks as held by the slot. Idempotent."""
        groups, keep, share = self._groups, self._open, self._masks.setdefault
        if len(self._masks) > _MAX_SHARED_MASKS:
            self._masks.clear()
        for group, block in blocks:
            table = groups.get(group)
            if table is None:
                table = groups[group] = {}
            mask = table.get(block, 0) & keep | bit
            table[block] = share(mask, mask)
        while self.entries > self._max_entries:
            self._evict()

    def remove(self, bit: int, blocks: Iterable[tuple[int, BlockHash]]) -> None:
        """The slot holds these blocks no longer. Idempotent."""
        keep = self._open & ~bit
        for group, block in blocks:
            table = self._groups.get(group, {})
            mask = table.get(block)
            if mask is None:
                continue
            if mask & keep:
                table[block] = mask & keep
            else:
                del table[block]

    def lookup(self, hashes: Sequence[BlockHash], group: int = 0) -> dict[WorkerId, int]:
        """How many leading blocks of `hashes` each worker holds; workers with none are left out. O(blocks)."""
        running = self._live
        found: dict[WorkerId, int] = {}
        depth = 0
        # `map` and the shared mask objects matter here: half of the time is waiting for memory.
        for mask in map(self._groups.get(group, {}).get, hashes):
            still = mask & running if mask else 0
            if still != running:
                if depth:
                    self._record(found, running & ~still, depth)
                if not still:
                    return found
                running = still
            depth += 1
        if depth:
            self._record(found, running, depth)
        return found

    def sweep(self, budget: int) -> bool:
        """Clear dead bits out of up to `budget` entries; True while more is to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._groups_to_sweep = self._dead, list(self._groups)
        keep = ~self._sweeping
        while budget > 0 and self._groups_to_sweep:
            table = self._groups[self._groups_to_sweep[-1]]
            if not self._to_sweep:
                self._to_sweep = list(table)
            chunk = self._to_sweep[-budget:]
            del self._to_sweep[-budget:]
            budget -= max(1, len(chunk))
            for block in chunk:
                mask = table.get(block, 0)
                if mask & keep:
                    table[block] = mask & keep
                elif mask:
                    del table[block]
            if not self._to_sweep:
                self._groups_to_sweep.pop()
        if not self._groups_to_sweep:
            self._dead &= keep
            self._sweeping = 0
        return bool(self._sweeping or self._dead)

    def blocks_of(self, worker: WorkerId) -> set[tuple[int, BlockHash]]:
        """Everything that `worker` is believed to hold; walks the whole table (for audits and tests)."""
        bits = sum(bit for bit, owner in self._owners.items() if owner == worker)
        return {(group, block) for group, table in self._groups.items() for block, mask in table.items() if mask & bits}

    def check_integrity(self) -> None:
        """Raise AssertionError when the table contradicts itself; walks the whole table."""
        known = self._open | self._dead
        masks = [mask for table in self._groups.values() for mask in table.values()]
        assert all(mask and not mask & ~known for mask in masks), "an entry has no bit or one of no slot"
        assert not self._live & ~self._open, "a live slot is not open"
        assert not self._open & self._dead, "a slot is open and dead"
        assert sum(self._owners) == self._live, "live slots and owners differ"

    def _record(self, found: dict[WorkerId, int], bits: int, depth: int) -> None:
        while bits:
            bit = bits & -bits
            found[self._owners[bit]] = depth
            bits ^= bit

    def _evict(self) -> None:
        """In batches: taking single oldest keys off a dictionary walks over all the gaps before them every time."""
        table = max(self._groups.values(), key=len)
        oldest = list(islice(table, max(1, len(table) // 16)))
        for block in oldest:
            del table[block]
        self.evicted += len(oldest)
