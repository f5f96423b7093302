"""BlockLedger against a model of plain sets, under any order of operations."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.ids import BlockId, GroupId
from tandem.core.ledger import BlockLedger, Holder, HoldKind

HOLDERS = [Holder(kind, key) for kind in HoldKind for key in "ab"]
holders = st.sampled_from(HOLDERS)
hashes = st.integers(0, 9).map(lambda n: BlockHash(bytes([n]) * 16))
picks = st.lists(st.integers(0, 1000), max_size=4)


class LedgerMachine(RuleBasedStateMachine):
    """`held`: the holders of each block; `content`: which block is findable under which hash; `twins`: blocks with the
    content of a findable one, in the order in which they were published."""

    @initialize(blocks=st.integers(0, 10))
    def start(self, blocks: int) -> None:
        self.clock = ManualClock()
        self.findable: set[BlockHash] = set()
        self.ledger = BlockLedger(
            GroupId(3), blocks, on_stored=self._stored, on_removed=lambda block_hash: self.findable.remove(block_hash),
            clock=self.clock,
        )  # fmt: skip
        self.since: dict[Holder, float] = {}
        self.held: dict[Holder, list[BlockId]] = {holder: [] for holder in HOLDERS}
        self.content: dict[BlockHash, BlockId] = {}
        self.twins: dict[BlockId, BlockHash] = {}

    def _stored(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.findable
        self.findable.add(block_hash)

    @rule(holder=holders, count=st.integers(0, 5))
    def allocate(self, holder: Holder, count: int) -> None:
        free = self.ledger.num_blocks - len(self._all_held())
        unheld_free = free - sum(b not in self._all_held() for b in self.content.values())
        got = self.ledger.allocate(holder, count)
        if count > free:
            assert got is None
            return
        assert got is not None
        assert len(set(got)) == count
        assert not set(got) & self._all_held()
        evicted = {h for h, b in self.content.items() if b in got}
        lost = self._evict(evicted)
        assert len(evicted) == max(0, count - unheld_free), "free blocks go first, and no more is evicted than needed"
        self.content = {h: b for h, b in self.content.items() if h not in lost}
        self.held[holder] += got

    @rule(holder=holders, picks=picks)
    def share(self, holder: Holder, picks: list[int]) -> None:
        known = sorted((self._all_held() | set(self.content.values())) - set(self.held[holder]))
        chosen = list(dict.fromkeys(known[p % len(known)] for p in picks)) if known else []
        self.ledger.share(holder, chosen)
        self.held[holder] += chosen

    @rule(holder=holders, picks=picks)
    def release_some(self, holder: Holder, picks: list[int]) -> None:
        mine = self.held[holder]
        chosen = list(dict.fromkeys(mine[p % len(mine)] for p in picks)) if mine else []
        self.ledger.release(holder, chosen)
        self.held[holder] = [block for block in mine if block not in chosen]
        self._end_twins()

    @rule(holder=holders)
    def release_all(self, holder: Holder) -> None:
        self.ledger.release(holder)
        self.held[holder] = []
        self._end_twins()

    @rule(source=holders, heir=holders)
    def move(self, source: Holder, heir: Holder) -> None:
        if source == heir or set(self.held[source]) & set(self.held[heir]):
            return
        self.ledger.move(source, heir)
        self.held[heir] += self.held[source]
        self.held[source] = []

    @rule(pick=st.integers(0, 1000), block_hash=hashes)
    def publish(self, pick: int, block_hash: BlockHash) -> None:
        nameless = sorted(self._all_held() - set(self.content.values()) - set(self.twins))
        if not nameless:
            return
        block = nameless[pick % len(nameless)]
        assert self.ledger.publish(block, block_hash) is (block_hash not in self.content)
        if self.content.setdefault(block_hash, block) != block:
            self.twins[block] = block_hash

    @rule()
    def evict(self) -> None:
        gone = {h for h, b in self.content.items() if b not in self._all_held()}
        assert self.ledger.evict_cached() == len(gone)
        lost = self._evict(gone)
        self.content = {h: b for h, b in self.content.items() if h not in lost}

    @rule(holder=holders)
    def unpublish(self, holder: Holder) -> None:
        mine = set(self.held[holder])
        self.ledger.unpublish(self.held[holder])
        self.twins = {block: block_hash for block, block_hash in self.twins.items() if block not in mine}
        lost = self._evict({h for h, b in self.content.items() if b in mine})
        self.content = {h: b for h, b in self.content.items() if h not in lost}

    @rule(leaving=st.sets(holders))
    def would_be_freed(self, leaving: set[Holder]) -> None:
        staying = {block for holder, blocks in self.held.items() if holder not in leaving for block in blocks}
        assert self.ledger.freed_without(leaving) == len(self._all_held() - staying)

    @rule(seconds=st.floats(0.1, 9))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def knows_since_when(self) -> None:
        """A hold is as old as its holder's first block."""
        if not hasattr(self, "ledger"):
            return
        held = {hold.holder: hold for hold in self.ledger.held() if hold.blocks}
        assert {holder: list(hold.blocks) for holder, hold in held.items()} == {h: b for h, b in self.held.items() if b}
        self.since = {holder: self.since.get(holder, self.clock.now_s()) for holder in held}
        assert all(hold.since_s <= self.clock.now_s() for hold in held.values())
        assert all(hold.since_s <= self.since[holder] for holder, hold in held.items())

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        ledger.check_integrity()
        counts = ledger.counts()
        assert counts.free + counts.cached + counts.request + counts.pushing + counts.reserved == counts.total
        assert ledger.available == counts.free + counts.cached == counts.total - len(self._all_held())
        assert {holder: ledger.blocks_of(holder) for holder in HOLDERS} == self.held
        assert {h: ledger.lookup(h) for h in self.content} == self.content
        assert set(ledger.hashes()) == set(self.content) == self.findable
        for block in self._all_held():
            holds = sum(block in blocks for blocks in self.held.values())
            assert ledger.is_shared(block) is (holds > 1 or block in self.content.values())

    def _evict(self, hashes: set[BlockHash]) -> set[BlockHash]:
        """Return the evicted hashes that are gone; of the others, a twin in use takes the place."""
        for block, block_hash in list(self.twins.items()):
            if block_hash in hashes:
                self.content[block_hash] = block
                del self.twins[block]
                hashes = hashes - {block_hash}
        return hashes

    def _end_twins(self) -> None:
        self.twins = {block: block_hash for block, block_hash in self.twins.items() if block in self._all_held()}

    def _all_held(self) -> set[BlockId]:
        return {block for blocks in self.held.values() for block in blocks}


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
