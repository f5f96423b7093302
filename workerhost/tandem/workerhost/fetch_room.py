"""Blocks for a fetched prefix: what is here already, what is reserved for the rest, and how it becomes cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.blockhash import BlockHash
from tandem.core.ids import BlockId
from tandem.core.ledger import Holder
from tandem.engine.engine import Engine
from tandem.kvtransfer.ticket import GroupBlocks
from tandem.workerhost import quota


@dataclass(frozen=True, slots=True)
class FetchRoom:
    """`tables[g][i]` is for the block with hash `hashes[i]` in KV group g: pinned hits first, then reserved ones."""

    holder: Holder
    hashes: tuple[BlockHash, ...]
    tables: tuple[tuple[BlockId, ...], ...]
    groups: tuple[GroupBlocks, ...]

    @property
    def new_blocks(self) -> int:
        """Blocks to receive, over all groups."""
        return sum(len(group.blocks) for group in self.groups)

    @property
    def gained_blocks(self) -> int:
        """Logical blocks that a request cannot use before: some group lacks them."""
        return len(self.hashes) - min(group.skip for group in self.groups)


def held_blocks(engine: Engine, hashes: Sequence[BlockHash]) -> int:
    """How many leading blocks are here in every KV group."""
    return min(len(ledger.match(hashes)) for ledger in engine.ledgers)


def reserve(
    engine: Engine, holder: Holder, hashes: Sequence[BlockHash], others: Sequence[FetchRoom]
) -> FetchRoom | None:
    """Pin what is here of these blocks and reserve the rest; None, and nothing held, if that would take from others.

    Nothing is taken that running requests need to go on, and all fetches together (`others` are those under way) stay
    within a peer's quota: a fetch saves work, it is never worth a wait.
    """
    groups: list[GroupBlocks] = []
    tables: list[tuple[BlockId, ...]] = []
    held = [sum(len(room.tables[ledger.group]) for room in others) for ledger in engine.ledgers]
    needs, pools = [len(hashes)] * len(engine.ledgers), [ledger.num_blocks for ledger in engine.ledgers]
    if engine.is_short_of_blocks or quota.is_over(held, needs, pools):
        return None
    for ledger in engine.ledgers:
        matched = ledger.match(hashes)
        ledger.share(holder, matched)
        missing = len(hashes) - len(matched)
        has_room = ledger.available - missing >= engine.growth_blocks
        new = ledger.allocate(holder, missing) if has_room else None
        if new is None:
            release(engine, holder)
            return None
        tables.append((*matched, *new))
        groups.append(GroupBlocks(group=ledger.group, skip=len(matched), blocks=tuple(new)))
    return FetchRoom(holder, tuple(hashes), tuple(tables), tuple(groups))


def keep(engine: Engine, room: FetchRoom) -> None:
    """Every rank has verified the blocks: make them findable, in every KV group, and let them be cache."""
    for ledger, table, group in zip(engine.ledgers, room.tables, room.groups, strict=True):
        for block, block_hash in zip(table[group.skip :], room.hashes[group.skip :], strict=True):
            ledger.publish(block, block_hash)
    release(engine, room.holder)


def release(engine: Engine, holder: Holder) -> None:
    """Give a holder's blocks back, in every group. Its transfer must be fenced, or quiet, before."""
    for ledger in engine.ledgers:
        ledger.release(holder)
