"""Blocks for a fetched prefix: cached ones, reservations for the rest, and their publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.block_hash import BlockHash
from tandem.core.ledger import Holder
from tandem.engine.engine import Engine
from tandem.kvtransfer.ticket import GroupBlocks
from tandem.workercore import fetch_quota
from tandem.workercore.block_reservation import BlockReservation
from tandem.workercore.block_reservation import reserve as room_for


@dataclass(frozen=True, slots=True)
class FetchRoom:
    """Block i of every table is for the block with hash `hashes[i]`."""

    hashes: tuple[BlockHash, ...]
    room: BlockReservation

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        return self.room.groups

    @property
    def new_blocks(self) -> int:
        """Blocks to receive, over all groups."""
        return sum(len(group.blocks) - group.hits for group in self.room.reserved)

    @property
    def gained_blocks(self) -> int:
        """Logical blocks that a request cannot use yet: some group lacks them."""
        return len(self.hashes) - min(group.hits for group in self.room.reserved)


def unneeded_blocks(engine: Engine, count: int, *, is_whole: bool) -> list[int]:
    """Of each KV group, the number of leading ones of `count` blocks that a continuation does not need: they lie behind
    its window. None `is_whole`."""
    specs = engine.layout.groups
    return [0 if is_whole else spec.first_needed(count * spec.block_tokens) for spec in specs]


def reserve(
    engine: Engine, holder: Holder, hashes: Sequence[BlockHash], others: Sequence[FetchRoom], *, is_whole: bool = True
) -> FetchRoom | None:
    """Pin the cached ones of these blocks and reserve the rest, save for `unneeded_blocks`; None, and nothing held, if
    that would take from others.

    Nothing is taken that running requests need to go on, and all fetches together (`others` are those under way) stay
    within a peer's quota: a fetch saves work, it is never worth a wait.
    """
    reserved = [[other.room.reserved[ledger.group] for other in others] for ledger in engine.ledgers]
    held = [sum(len(one.blocks) - one.left for one in of_group) for of_group in reserved]
    window_offsets, pools = (
        unneeded_blocks(engine, len(hashes), is_whole=is_whole),
        [led.num_blocks for led in engine.ledgers],
    )
    needs = [len(hashes) - left for left in window_offsets]
    if engine.is_short_of_blocks or fetch_quota.is_over(held, needs, pools):
        return None
    room = room_for(engine, holder, hashes, len(hashes), window_offsets)
    return FetchRoom(tuple(hashes), room) if room is not None else None


def keep(engine: Engine, fetched: FetchRoom) -> None:
    """Publish the blocks, which every rank has verified, in every KV group, as cached ones."""
    for ledger, group in zip(engine.ledgers, fetched.room.reserved, strict=True):
        for block, block_hash in zip(group.blocks[group.hits :], fetched.hashes[group.hits :], strict=True):
            ledger.publish(block, block_hash)
    engine.release_holder(fetched.room.holder)
