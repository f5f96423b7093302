"""Room for blocks that a peer is to push: cached blocks, new ones for the rest, and their form in a ticket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.block_hash import BlockHash
from tandem.core.ids import BlockId
from tandem.core.ledger import Holder
from tandem.engine.block_manager import Reserved
from tandem.engine.engine import Engine
from tandem.kvtransfer.ticket import GroupBlocks


@dataclass(frozen=True, slots=True)
class BlockReservation:
    """Blocks that `holder` has, group by group."""

    holder: Holder
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


def reserve(
    engine: Engine, holder: Holder, hashes: Sequence[BlockHash], count: int, window_offsets: Sequence[int] | None = None
) -> BlockReservation | None:
    """Reserve room for `count` blocks a group, see `Engine.reserve`. `Engine.release_holder(holder)` gives it back."""
    reserved = engine.reserve(holder, hashes, count, window_offsets)
    return BlockReservation(holder, reserved) if reserved is not None else None
