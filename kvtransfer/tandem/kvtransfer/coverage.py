"""Which cells (group, block, layer, head) of a ticket have arrived on this rank. Not thread-safe; moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.ids import BlockId, GroupId
from tandem.core.kvlayout import KVGroupSpec
from tandem.kvtransfer.frame import Frame, MalformedFrameError
from tandem.kvtransfer.pool import PoolAccess, is_within, payload_bytes
from tandem.kvtransfer.ticket import Ticket


class Coverage:
    """Counts every cell of the ticket once. Raises ValueError for unknown groups and for a block named twice."""

    def __init__(self, ticket: Ticket, pools: Mapping[GroupId, PoolAccess]) -> None:
        self._specs: dict[GroupId, tuple[KVGroupSpec, int]] = {}
        self._arrived: dict[GroupId, dict[BlockId, int]] = {}
        self.missing_cells = 0
        for blocks in ticket.groups:
            if blocks.group not in pools or blocks.group in self._arrived:
                raise ValueError(f"the ticket names group {blocks.group}, which is unknown here or named twice")
            pool = pools[blocks.group]
            arrived = dict.fromkeys(blocks.blocks, 0)
            if len(arrived) != len(blocks.blocks):
                raise ValueError(f"the ticket names a block of group {blocks.group} twice")
            heads = pool.spec.heads_local(pool.tp)
            self._specs[blocks.group] = pool.spec, heads
            self._arrived[blocks.group] = arrived
            self.missing_cells += len(arrived) * len(pool.spec.layers) * heads

    @property
    def is_complete(self) -> bool:
        return self.missing_cells == 0

    def check(self, frame: Frame, payload_size: int) -> None:
        """Raise MalformedFrameError unless the frame lies inside the ticket and its payload has the right size."""
        if frame.group not in self._specs:
            raise MalformedFrameError(f"group {frame.group} is not in the ticket")
        spec, heads = self._specs[frame.group]
        if not is_within(frame.layers, len(spec.layers)) or not is_within(frame.heads, heads):
            raise MalformedFrameError(f"layers {frame.layers} or heads {frame.heads} lie outside group {frame.group}")
        if not self._arrived[frame.group].keys() >= set(frame.blocks):
            raise MalformedFrameError(f"a block of group {frame.group} that is not in the ticket")
        expected = payload_bytes(spec, len(frame.blocks), frame.layers, frame.heads)
        if not payload_size == frame.payload_bytes == expected:
            raise MalformedFrameError(f"{payload_size} payload bytes where {expected} belong")

    def has_new(self, frame: Frame) -> bool:
        """Whether the frame (checked before) brings any cell that has not arrived."""
        arrived, mask = self._arrived[frame.group], self._mask(frame)
        return any(mask & ~arrived[block] for block in frame.blocks)

    def mark(self, frame: Frame) -> int:
        """Note the frame's cells as arrived; the number of blocks that became complete by it."""
        spec, heads = self._specs[frame.group]
        arrived, mask, full = self._arrived[frame.group], self._mask(frame), (1 << len(spec.layers) * heads) - 1
        completed = 0
        for block in frame.blocks:
            before = arrived[block]
            after = before | mask
            self.missing_cells -= (after ^ before).bit_count()
            arrived[block] = after
            completed += after == full != before
        return completed

    def _mask(self, frame: Frame) -> int:
        """One bit a (layer, head), layers outermost."""
        heads = self._specs[frame.group][1]
        row = ((1 << len(frame.heads)) - 1) << frame.heads.start
        mask = 0
        for layer in frame.layers:
            mask |= row << layer * heads
        return mask
