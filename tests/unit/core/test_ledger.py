"""The block ledger by example: states, eviction order, and misuse."""

from collections.abc import Callable

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.clock import ManualClock
from tandem.core.ids import BlockId, GroupId
from tandem.core.ledger import BlockLedger, Holder, HoldKind, LedgerError

A, B = Holder(HoldKind.REQUEST, "a"), Holder(HoldKind.REQUEST, "b")
TICKET = Holder(HoldKind.RESERVED, "t")
PUSH = Holder(HoldKind.PUSHING, "a")


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def ledger(blocks: int = 4) -> BlockLedger:
    return BlockLedger(GroupId(0), blocks)


def test_all_or_nothing() -> None:
    book = ledger()
    assert book.allocate(A, 5) is None
    first = book.allocate(A, 3)
    assert first is not None
    assert len(set(first)) == 3
    assert book.allocate(B, 2) is None
    assert book.blocks_of(A) == first
    assert book.allocate(B, 0) == []
    book.check_integrity()


def test_published_blocks_stay_cached_and_others_go_free() -> None:
    book = ledger()
    one, two = book.allocate(A, 2) or []
    assert book.publish(one, block_hash(1))
    book.release(A)
    counts = book.counts()
    assert (counts.cached, counts.free) == (1, 3)
    assert book.lookup(block_hash(1)) == one
    assert book.match([block_hash(1), block_hash(2)]) == [one]
    assert book.match([block_hash(2), block_hash(1)]) == []
    assert two != one


def test_eviction_takes_the_tail_of_the_oldest_first() -> None:
    removed: list[BlockHash] = []
    book = BlockLedger(GroupId(0), 4, on_removed=removed.append)
    for holder, numbers in ((A, (1, 2)), (B, (3, 4))):
        for block, number in zip(book.allocate(holder, 2) or [], numbers, strict=True):
            book.publish(block, block_hash(number))
        book.release(holder)
    assert book.available == 4
    for _ in range(4):
        book.allocate(TICKET, 1)
    assert removed == [block_hash(n) for n in (2, 1, 4, 3)]


def test_sharing_saves_a_cached_block_from_eviction() -> None:
    book = ledger(2)
    block, _ = book.allocate(A, 2) or []
    book.publish(block, block_hash(1))
    book.release(A)
    book.share(B, [block])
    assert book.allocate(A, 2) is None
    assert book.allocate(A, 1) is not None
    assert book.lookup(block_hash(1)) == block


def test_the_second_block_with_the_same_content_is_not_findable() -> None:
    book = ledger()
    one, two = book.allocate(A, 2) or []
    assert book.publish(one, block_hash(1))
    assert book.publish(one, block_hash(1))
    assert not book.publish(two, block_hash(1))
    book.release(A)
    assert book.counts().cached == 1


def test_a_twin_in_use_takes_the_place_of_the_block_that_is_evicted() -> None:
    removed: list[BlockHash] = []
    book = BlockLedger(GroupId(0), 3, on_removed=removed.append)
    (one,), (two,) = book.allocate(A, 1) or [], book.allocate(B, 1) or []
    assert book.publish(one, block_hash(1))
    assert not book.publish(two, block_hash(1))
    book.release(A)
    assert book.allocate(TICKET, 2) is not None
    assert book.lookup(block_hash(1)) == two
    assert removed == []
    book.check_integrity()


def test_the_use_of_a_twin_is_a_use_of_the_block() -> None:
    removed: list[BlockHash] = []
    book = BlockLedger(GroupId(0), 4, on_removed=removed.append)
    first, second = book.allocate(A, 1) or [], book.allocate(B, 2) or []
    book.publish(first[0], block_hash(1))
    book.release(A)
    for block, number in zip(second, (1, 2), strict=True):
        book.publish(block, block_hash(number))
    book.release(B)
    for _ in range(4):
        book.allocate(TICKET, 1)
    assert removed == [block_hash(2), block_hash(1)]


def test_a_block_counts_as_its_highest_kind() -> None:
    book = ledger()
    blocks = book.allocate(A, 2) or []
    book.share(PUSH, blocks[:1])
    book.allocate(TICKET, 1)
    counts = book.counts()
    assert (counts.request, counts.pushing, counts.reserved, counts.free) == (1, 1, 1, 1)
    assert book.is_shared(blocks[0])
    assert not book.is_shared(blocks[1])
    book.publish(blocks[1], block_hash(1))
    assert book.is_shared(blocks[1])


def test_move_hands_over_everything() -> None:
    book = ledger()
    blocks = book.allocate(TICKET, 3) or []
    book.move(TICKET, A)
    assert (book.blocks_of(A), book.blocks_of(TICKET)) == (blocks, [])
    book.move(TICKET, A)
    assert book.blocks_of(A) == blocks
    book.check_integrity()


def test_partial_release_keeps_the_rest() -> None:
    book = ledger()
    blocks = book.allocate(A, 3) or []
    book.release(A, blocks[1:2])
    assert book.blocks_of(A) == [blocks[0], blocks[2]]
    book.release(A, [blocks[0], blocks[2]])
    assert book.holders() == {}
    book.release(A)
    book.check_integrity()


def test_evict_cached_forgets_only_what_nobody_holds() -> None:
    book = ledger()
    one, two = book.allocate(A, 2) or []
    book.publish(one, block_hash(1))
    book.publish(two, block_hash(2))
    book.release(A, [two])
    assert book.evict_cached() == 1
    assert book.hashes() == [block_hash(1)]


def test_a_disowned_block_is_never_found_again() -> None:
    """Its twin of another request is; one that is disowned with it is not, nor are they cached when they are let go."""
    removed: list[BlockHash] = []
    book = BlockLedger(GroupId(0), 5, on_removed=removed.append)
    one, two = book.allocate(A, 2) or []
    book.share(PUSH, [one, two])
    (twin,) = book.allocate(B, 1) or []
    for block, number in ((one, 1), (two, 2), (twin, 1)):
        book.publish(block, block_hash(number))
    book.unpublish([one, two])
    assert (book.lookup(block_hash(1)), book.lookup(block_hash(2)), removed) == (twin, None, [block_hash(2)])
    book.release(A)
    book.release(PUSH)
    assert (book.counts().cached, book.counts().free) == (0, 4)
    book.release(B)
    assert book.match([block_hash(1), block_hash(2)]) == [twin]
    book.unpublish([twin])
    assert (book.hashes(), book.counts().free, removed) == ([], 5, [block_hash(2), block_hash(1)])
    book.check_integrity()


def test_misuse_is_an_error() -> None:
    book = ledger()
    (block,) = book.allocate(A, 1) or []
    free = next(BlockId(b) for b in range(4) if b != block)
    with pytest.raises(LedgerError, match="is free"):
        book.share(B, [free])
    with pytest.raises(LedgerError, match="already holds"):
        book.share(A, [block])
    with pytest.raises(LedgerError, match="not held"):
        book.publish(free, block_hash(1))
    book.publish(block, block_hash(1))
    with pytest.raises(LedgerError, match="another hash"):
        book.publish(block, block_hash(2))
    with pytest.raises(LedgerError, match="does not hold"):
        book.release(A, [free])
    book.share(B, [block])
    with pytest.raises(LedgerError, match="already holds"):
        book.move(A, B)


def test_a_twin_that_is_published_again_is_still_that_twin() -> None:
    book = ledger()
    one, two = book.allocate(A, 2) or []
    assert book.publish(one, block_hash(5))
    for _ in range(2):
        assert not book.publish(two, block_hash(5))
    for other in (4, 6):
        with pytest.raises(LedgerError, match="another hash"):
            book.publish(two, block_hash(other))
    book.check_integrity()


def test_the_first_twin_takes_the_place_and_the_second_after_it() -> None:
    book = ledger()
    blocks = book.allocate(A, 3) or []
    assert [book.publish(block, block_hash(1)) for block in blocks] == [True, False, False]
    for block, heir in zip(blocks, (blocks[1], blocks[2], None), strict=True):
        book.unpublish([block])
        assert book.lookup(block_hash(1)) == heir
        book.check_integrity()


def test_what_has_no_name_is_disowned_without_harm() -> None:
    book = ledger()
    first, named, last = book.allocate(A, 3) or []
    book.publish(named, block_hash(1))
    book.unpublish([first, named, last])
    assert book.hashes() == []
    assert book.blocks_of(A) == [first, named, last]
    book.check_integrity()


def test_blocks_are_held_since_the_first_of_them_came() -> None:
    clock = ManualClock(5.0)
    book = BlockLedger(GroupId(0), 4, clock=clock)
    book.allocate(A, 1)
    clock.advance(2.0)
    book.allocate(A, 1)
    book.allocate(B, 1)
    assert {hold.holder: (len(hold.blocks), hold.since_s) for hold in book.held()} == {A: (2, 5.0), B: (1, 7.0)}
    book.move(B, TICKET)
    clock.advance(1.0)
    book.release(A)
    book.allocate(A, 1)
    assert {hold.holder: hold.since_s for hold in book.held()} == {A: 8.0, TICKET: 7.0}


def full_book() -> BlockLedger:
    """Eight blocks: A and PUSH hold block 0, A block 1 and 2 alone, 1 and 2 have one content; 3 is cached."""
    book = ledger(8)
    blocks = book.allocate(A, 4) or []
    assert blocks == [0, 1, 2, 3]
    book.share(PUSH, blocks[:1])
    for block, number in zip(blocks, (0, 1, 1, 3), strict=True):
        book.publish(block, block_hash(number))
    book.release(A, blocks[3:])
    book.check_integrity()
    return book


def free_twice(book: BlockLedger) -> None:
    book._free[0] = book._free[1]


def count_as_pushed(book: BlockLedger) -> None:
    book._kind_counts[HoldKind.REQUEST] -= 1
    book._kind_counts[HoldKind.PUSHING] += 1


def take_the_name_of_a_cached_block(book: BlockLedger) -> None:
    del book._block_of[book._hash_of.pop(BlockId(3))]


def twin_of(book: BlockLedger, block: int, number: int) -> None:
    book._twin_hash[BlockId(block)] = block_hash(number)
    book._twins.setdefault(block_hash(number), {})[BlockId(block)] = None


def leave_a_twin_alone(book: BlockLedger) -> None:
    twin_of(book, 2, 8)
    del book._twins[block_hash(1)]


DAMAGES: dict[str, tuple[Callable[[BlockLedger], object], str]] = {
    "a free block is lost": (lambda book: book._free.pop(), "does not add up"),
    "a block is free twice": (free_twice, "does not add up, 7 distinct"),
    "a cached block is lost": (lambda book: book._cached.popitem(), "does not add up"),
    "nobody holds a held block": (lambda book: book._holders.popitem(), "does not add up"),
    "a holder is lost": (lambda book: book._held_by.pop(PUSH), "their ages disagree"),
    "an age is lost": (lambda book: book._since_s.pop(PUSH), "their ages disagree"),
    "listed twice": (lambda book: book._held_by[A].append(BlockId(1)), "lists a block twice"),
    "listed too often": (lambda book: book._held_by[PUSH].append(BlockId(1)), "holders and blocks disagree"),
    "listed too rarely": (lambda book: book._held_by[A].pop(), "holders and blocks disagree"),
    "counted wrongly": (count_as_pushed, "counted"),
    "a name is lost": (lambda book: book._hash_of.popitem(), "hashes and blocks disagree"),
    "a block is not found": (lambda book: book._block_of.popitem(), "hashes and blocks disagree"),
    "a cached block has no name": (take_the_name_of_a_cached_block, "a cached block has no hash"),
    "a twin is forgotten": (lambda book: book._twin_hash.popitem(), "twins and their hashes"),
    "twins of nothing": (lambda book: book._twins.setdefault(block_hash(9), {}), "twins and their hashes"),
    "a free twin": (lambda book: twin_of(book, 7, 1), "a twin is not held"),
    "a twin with a name": (lambda book: twin_of(book, 0, 1), "a twin is not held"),
    "a twin of nobody": (leave_a_twin_alone, "the twin of none"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_integrity_sees_damage(damage: str) -> None:
    book = full_book()
    harm, what = DAMAGES[damage]
    harm(book)
    with pytest.raises(LedgerError, match=what):
        book.check_integrity()
