"""Ownership of each KV block of one group: free, cached, or held by requests, reservations and pushes.

    free ──allocate──▶ held by one or more holders ──last release──▶ cached (its hash is known) or free
                            ▲                                            │
                            └───────────────── share ────────────────────┘   cached ──evicted by allocate──▶ held

A block is *published* when its content is complete and known by hash; only then can another request share it. Two
requests may compute the same content at once: the second block is a *twin*. Only the first is findable, but a twin in
use counts as a use of it, and takes its place when it is evicted. So a request that publishes all blocks of a sequence
keeps all of them findable, and a block never stays findable longer than those before it. Not thread-safe: one thread
(the step loop) owns a ledger. Nothing here moves bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tandem.core.block_hash import BlockHash
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.ids import Attempt, BlockId, GroupId, RequestId, TransferId


class HoldKind(IntEnum):
    """Purpose of a hold on a block; a block with several holders counts as the highest kind."""

    REQUEST = 1
    PUSHING = 2
    RESERVED = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """An owner of blocks: a kind, and a key that is unique in the worker: the attempt of a request, and the transfer.

    request    chatcmpl-7#1#0          attempt 1, choice 0 (or #spare)
    reserved   chatcmpl-7#1/48213      attempt 1, transfer 48213
    pushing    chatcmpl-7#1/48213
    """

    kind: HoldKind
    key: str


@dataclass(frozen=True, slots=True)
class Subject:
    """Owner of a hold. Foreign keys give attempt 0; `transfer` is 0 where there is none."""

    key: str
    """The attempt's key in the engine and the request table."""
    request: RequestId
    attempt: Attempt
    transfer: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """All blocks of one holder, and since when it has any (monotonic seconds)."""

    holder: Holder
    blocks: tuple[BlockId, ...]
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Blocks by state; the five always add up to `total`."""

    total: int
    free: int
    cached: int
    request: int
    pushing: int
    reserved: int


class LedgerError(RuntimeError):
    """The ledger contradicts itself or was used wrongly: a bug, never a user's mistake."""


class BlockLedger:
    """Ownership of `num_blocks` blocks of one KV group.

    `on_stored(hash)` and `on_removed(hash)` are called when a hash becomes findable here or stops being so; they must
    not call back into the ledger.
    """

    def __init__(
        self,
        group: GroupId,
        num_blocks: int,
        *,
        on_stored: Callable[[BlockHash], None] | None = None,
        on_removed: Callable[[BlockHash], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.group = group
        self.num_blocks = num_blocks
        self._on_stored, self._on_removed = on_stored, on_removed
        self._clock = clock or MonotonicClock()
        self._free: list[BlockId] = [BlockId(b) for b in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # oldest first
        self._holders: dict[BlockId, set[Holder]] = {}
        self._held_by: dict[Holder, list[BlockId]] = {}
        self._since_s: dict[Holder, float] = {}
        self._kind_counts = dict.fromkeys(HoldKind, 0)  # of held blocks, each by its highest kind
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}
        self._twin_hash: dict[BlockId, BlockHash] = {}
        self._twins: dict[BlockHash, dict[BlockId, None]] = {}  # held blocks with the content of a findable one

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: Holder, count: int) -> list[BlockId] | None:
        """Give `holder` `count` blocks of unknown content, evicting the least recently used; None if too few."""
        if count > self.available:
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._holders[block] = {holder}
        self._kind_counts[holder.kind] += count
        self._held(holder).extend(blocks)
        return blocks

    def share(self, holder: Holder, blocks: Sequence[BlockId]) -> None:
        """Make `holder` a further holder of blocks that are cached or held; raises LedgerError for a free one."""
        for block in blocks:
            holders = self._holders.get(block)
            if holders is None:
                if block not in self._cached:
                    raise LedgerError(f"block {block} of group {self.group} is free and cannot be shared")
                del self._cached[block]
                holders = self._holders[block] = set()
            if holder in holders:
                raise LedgerError(f"{holder} already holds block {block}")
            self._uncount(holders)
            holders.add(holder)
            self._kind_counts[_kind_of(holders)] += 1
        self._held(holder).extend(blocks)

    def move(self, source: Holder, target: Holder) -> None:
        """Hand all of `source`'s blocks to `target`, which must not hold any of them yet (reserved → request)."""
        blocks = self._held_by.pop(source, [])
        self._since_s.pop(source, None)
        for block in blocks:
            holders = self._holders[block]
            self._uncount(holders)
            holders.remove(source)
            if target in holders:
                raise LedgerError(f"{target} already holds block {block}")
            holders.add(target)
            self._kind_counts[_kind_of(holders)] += 1
        if blocks:
            self._held(target).extend(blocks)

    def release(self, holder: Holder, blocks: Iterable[BlockId] | None = None) -> None:
        """Take `holder` off `blocks` (all of its blocks by default). Tails are released first, so evicted first."""
        held = self._held_by.get(holder)
        if held is None:
            return
        leaving = list(held) if blocks is None else list(blocks)
        for block in reversed(leaving):
            holders = self._holders.get(block)
            if holders is None or holder not in holders:
                raise LedgerError(f"{holder} does not hold block {block}")
            self._uncount(holders)
            holders.remove(holder)
            if holders:
                self._kind_counts[_kind_of(holders)] += 1
            else:
                del self._holders[block]
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._end_twin(block)
                    self._free.append(block)
        if blocks is None:
            self._let_go(holder)
        else:
            gone = set(leaving)
            rest = [block for block in held if block not in gone]
            if rest:
                self._held_by[holder] = rest
            else:
                self._let_go(holder)

    def publish(self, block: BlockId, block_hash: BlockHash) -> bool:
        """Mark a held block's content as complete, with this hash. False if another block already has it: then this one
        is its twin."""
        if block not in self._holders:
            raise LedgerError(f"block {block} is published but not held")
        known = self._block_of.get(block_hash)
        if known == block:
            return True
        if block in self._hash_of or self._twin_hash.get(block, block_hash) != block_hash:
            raise LedgerError(f"block {block} already has another hash")
        if known is not None:
            self._twin_hash[block] = block_hash
            self._twins.setdefault(block_hash, {})[block] = None
            return False
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        if self._on_stored:
            self._on_stored(block_hash)
        return True

    def lookup(self, block_hash: BlockHash) -> BlockId | None:
        """The block with this content, or None."""
        return self._block_of.get(block_hash)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest prefix of `hashes` that is here. Nothing is held: call `share` before anything else."""
        blocks: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def is_findable(self, block_hash: BlockHash) -> bool:
        """True if `match` would find a block of this hash."""
        return block_hash in self._block_of

    def is_shared(self, block: BlockId) -> bool:
        """True if a write into this block could be seen by another holder: several holders, or a published hash."""
        return len(self._holders.get(block, ())) > 1 or block in self._hash_of

    def blocks_of(self, holder: Holder) -> list[BlockId]:
        """The blocks of a holder, in the order of allocation."""
        return list(self._held_by.get(holder, ()))

    def holders(self) -> dict[Holder, int]:
        """How many blocks each holder has, for audits."""
        return {holder: len(blocks) for holder, blocks in self._held_by.items()}

    def held(self) -> list[Held]:
        """Every holder with its blocks and its age, for audits."""
        return [
            Held(holder=holder, blocks=tuple(blocks), since_s=self._since_s[holder])
            for holder, blocks in self._held_by.items()
        ]

    def freed_without(self, leaving: Collection[Holder]) -> int:
        """How many blocks would be available in addition if all of `leaving` let go; costs as much as they hold."""
        gone = set(leaving)
        blocks = {block for holder in gone for block in self._held_by.get(holder, ())}
        return sum(self._holders[block] <= gone for block in blocks)

    def hashes(self) -> list[BlockHash]:
        """All findable hashes."""
        return list(self._block_of)

    def evict_cached(self) -> int:
        """Forget every block that is only cached; returns how many."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def unpublish(self, blocks: Iterable[BlockId]) -> None:
        """Make these blocks unfindable, held or only cached: what is in them may be wrong. Where another block has the
        content that one of them should have, that one is found instead."""
        blocks = list(blocks)
        for block in blocks:
            if block in self._twin_hash:
                self._drop_twin(block)
        for block in blocks:
            if block not in self._hash_of:
                continue
            self._unname(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def counts(self) -> LedgerCounts:
        """Blocks by state; costs the same however many are held."""
        by_kind = self._kind_counts
        return LedgerCounts(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            request=by_kind[HoldKind.REQUEST],
            pushing=by_kind[HoldKind.PUSHING],
            reserved=by_kind[HoldKind.RESERVED],
        )

    def check_integrity(self) -> None:
        """Raise LedgerError if any two views of the ledger disagree. Called whenever the step loop is idle."""
        counts = self.counts()
        in_states = counts.free + counts.cached + counts.request + counts.pushing + counts.reserved
        distinct = set(self._free) | set(self._cached) | set(self._holders)
        if in_states != self.num_blocks or len(distinct) != self.num_blocks:
            raise LedgerError(f"group {self.group}: {counts} does not add up, {len(distinct)} distinct blocks")
        pairs = {(holder, block) for holder, blocks in self._held_by.items() for block in blocks}
        if sum(map(len, self._held_by.values())) != len(pairs):
            raise LedgerError(f"group {self.group}: a holder lists a block twice")
        if self._since_s.keys() != self._held_by.keys():
            raise LedgerError(f"group {self.group}: holders and their ages disagree")
        if pairs != {(holder, block) for block, holders in self._holders.items() for holder in holders}:
            raise LedgerError(f"group {self.group}: holders and blocks disagree")
        by_kind = dict.fromkeys(HoldKind, 0)
        for holders in self._holders.values():
            by_kind[_kind_of(holders)] += 1
        if by_kind != self._kind_counts:
            raise LedgerError(f"group {self.group}: counted {self._kind_counts}, held are {by_kind}")
        if {h: b for b, h in self._hash_of.items()} != self._block_of:
            raise LedgerError(f"group {self.group}: hashes and blocks disagree")
        if any(block not in self._hash_of for block in self._cached):
            raise LedgerError(f"group {self.group}: a cached block has no hash")
        twins = {block: block_hash for block_hash, blocks in self._twins.items() for block in blocks}
        if twins != self._twin_hash or not all(self._twins.values()):
            raise LedgerError(f"group {self.group}: twins and their hashes disagree")
        if any(b not in self._holders or b in self._hash_of or h not in self._block_of for b, h in twins.items()):
            raise LedgerError(f"group {self.group}: a twin is not held, or is the twin of none")

    def _held(self, holder: Holder) -> list[BlockId]:
        held = self._held_by.get(holder)
        if held is None:
            held = self._held_by[holder] = []
            self._since_s[holder] = self._clock.now_s()
        return held

    def _let_go(self, holder: Holder) -> None:
        del self._held_by[holder]
        del self._since_s[holder]

    def _uncount(self, holders: set[Holder]) -> None:
        if holders:
            self._kind_counts[_kind_of(holders)] -= 1

    def _take(self) -> BlockId:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> BlockId:
        block, _ = self._cached.popitem(last=False)
        self._unname(block)
        return block

    def _unname(self, block: BlockId) -> None:
        """Give the name to another block with its content; without one, the name is gone."""
        block_hash = self._hash_of.pop(block)
        heir = next(iter(self._twins.get(block_hash, ())), None)
        if heir is not None:
            self._drop_twin(heir)
            self._hash_of[heir], self._block_of[block_hash] = block_hash, heir
            return
        del self._block_of[block_hash]
        if self._on_removed:
            self._on_removed(block_hash)

    def _end_twin(self, block: BlockId) -> None:
        """Its last hold ended: count this as a use of the block that is findable in its place."""
        if block in self._twin_hash:
            known = self._block_of[self._drop_twin(block)]
            if known in self._cached:
                self._cached.move_to_end(known)

    def _drop_twin(self, block: BlockId) -> BlockHash:
        block_hash = self._twin_hash.pop(block)
        twins = self._twins[block_hash]
        del twins[block]
        if not twins:
            del self._twins[block_hash]
        return block_hash


def subject_of(holder: Holder) -> Subject:
    """Read a holder's key; never fails."""
    key, transfer = holder.key, 0
    if holder.kind is HoldKind.REQUEST:
        if key.count("#") >= 2:
            key = key.rpartition("#")[0]
    else:
        head, slash, tail = key.rpartition("/")
        if slash and tail.isdecimal():
            key, transfer = head, int(tail)
    request, mark, attempt = key.rpartition("#")
    if not mark or not attempt.isdecimal():
        return Subject(key, RequestId(key), Attempt(0), TransferId(transfer))
    return Subject(key, RequestId(request), Attempt(int(attempt)), TransferId(transfer))


def _kind_of(holders: set[Holder]) -> HoldKind:
    return max(holder.kind for holder in holders)
