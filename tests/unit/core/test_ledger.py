"""The block ledger by example: states, eviction order, and misuse."""

from __future__ import annotations

import pytest

from tandem.core.blockhash import BlockHash
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
    book.disown([one, two])
    assert (book.lookup(block_hash(1)), book.lookup(block_hash(2)), removed) == (twin, None, [block_hash(2)])
    book.release(A)
    book.release(PUSH)
    assert (book.counts().cached, book.counts().free) == (0, 4)
    book.release(B)
    assert book.match([block_hash(1), block_hash(2)]) == [twin]
    book.disown([twin])
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
    with pytest.raises(LedgerError, match="nobody holds"):
        book.publish(free, block_hash(1))
    book.publish(block, block_hash(1))
    with pytest.raises(LedgerError, match="another hash"):
        book.publish(block, block_hash(2))
    with pytest.raises(LedgerError, match="does not hold"):
        book.release(A, [free])
    book.share(B, [block])
    with pytest.raises(LedgerError, match="already holds"):
        book.move(A, B)


@pytest.mark.parametrize("damage", ["_free", "_cached", "_held_by", "_hash_of", "_holders"])
def test_check_integrity_sees_damage(damage: str) -> None:
    book = ledger()
    one, _ = book.allocate(A, 2) or []
    book.publish(one, block_hash(1))
    book.release(A, [one])
    book.check_integrity()
    getattr(book, damage).popitem() if damage != "_free" else book._free.pop()
    with pytest.raises(LedgerError):
        book.check_integrity()
