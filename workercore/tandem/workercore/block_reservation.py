"""Blocks that a peer is to push: cached ones, reservations for the rest, their form in a ticket, and publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId
from tandem.core.ledger import Holder
from tandem.engine.block_manager import Reserved
from tandem.engine.engine import Engine
from tandem.kvtransfer.ticket import GroupBlocks
from tandem.workercore import peer_block_quota


@dataclass(frozen=True, slots=True)
class BlockReservation:
    """Blocks that `holder` has, group by group. Block i of every table is for the block with hash `hashes[i]`."""

    holder: Holder
    hashes: tuple[BlockHash, ...]
    reserved: tuple[Reserved, ...]

    @property
    def tables(self) -> tuple[list[BlockId], ...]:
        """In logical order: blocks that left a window (nothing is held for them), cached blocks, then new ones."""
        return tuple(group.blocks for group in self.reserved)

    @property
    def window_offsets(self) -> tuple[int, ...]:
        """Number of leading entries of each table without a held block."""
        return tuple(group.left for group in self.reserved)

    @property
    def groups(self) -> tuple[GroupBlocks, ...]:
        """In a ticket's form: nothing is sent for cached blocks, nor for those that left the window."""
        return tuple(
            GroupBlocks(group=group.group, skip=group.hits, blocks=tuple(group.blocks[group.hits :]))
            for group in self.reserved
        )

    @property
    def held_blocks(self) -> list[int]:
        """Held blocks of each group, pinned prefix hits among them."""
        return [len(group.blocks) - group.left for group in self.reserved]

    @property
    def cached_blocks(self) -> int:
        """Blocks found in the prefix cache, over all groups."""
        return sum(group.hits - group.left for group in self.reserved)

    @property
    def new_blocks(self) -> int:
        """Blocks to receive, over all groups."""
        return sum(len(group.blocks) - group.hits for group in self.reserved)

    @property
    def gained_blocks(self) -> int:
        """Logical blocks of a prefix that a request cannot use yet: some group lacks them."""
        return len(self.hashes) - min(group.hits for group in self.reserved)


def reserve_blocks(
    engine: Engine, holder: Holder, hashes: Sequence[BlockHash], count: int, window_offsets: Sequence[int] | None = None
) -> BlockReservation | None:
    """Reserve room for `count` blocks a group, see `Engine.reserve`; `BlockSpace.release_holder` gives it back."""
    reserved = engine.reserve(holder, hashes, count, window_offsets)
    return BlockReservation(holder, tuple(hashes), reserved) if reserved is not None else None


def reserve_prefix(
    engine: Engine,
    holder: Holder,
    hashes: Sequence[BlockHash],
    others: Sequence[BlockReservation],
    *,
    is_whole: bool = True,
) -> BlockReservation | None:
    """Pin the cached ones of a prefix's blocks and reserve the rest, save for `unneeded_blocks`; None, and nothing
    held, if that would take from others.

    Nothing is taken that running requests need to go on, and all fetches together (`others` are those under way) stay
    within a peer's quota: a fetch saves work, it is never worth a wait.
    """
    held = [sum(counts) for counts in zip(*(other.held_blocks for other in others), strict=True)]
    window_offsets = unneeded_blocks(engine, len(hashes), is_whole=is_whole)
    needs, pools = [len(hashes) - left for left in window_offsets], [led.num_blocks for led in engine.ledgers]
    if engine.is_short_of_blocks or peer_block_quota.is_over(held, needs, pools):
        return None
    return reserve_blocks(engine, holder, hashes, len(hashes), window_offsets)


def unneeded_blocks(engine: Engine, count: int, *, is_whole: bool) -> list[int]:
    """Of each KV group, the number of leading ones of `count` blocks that a continuation does not need: they lie behind
    its window. None `is_whole`."""
    specs = engine.layout.groups
    return [0 if is_whole else spec.first_needed(count * spec.block_tokens) for spec in specs]


def publish_prefix(engine: Engine, fetched: BlockReservation) -> None:
    """Publish the blocks, which every rank has verified, in every KV group, as cached ones."""
    for ledger, group in zip(engine.ledgers, fetched.reserved, strict=True):
        for block, block_hash in zip(group.blocks[group.hits :], fetched.hashes[group.hits :], strict=True):
            ledger.publish(block, block_hash)
    engine.blocks.release_holder(fetched.holder)
