"""Which cells (group, block, layer, head) of a ticket have arrived on this rank. Not thread-safe; moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.frame import Frame, MalformedFrameError
from tandem.kvtransfer.pool import PoolAccess, is_within
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wirecodec import PayloadForm, codec_named

_MOST_MASKS = 256


class Coverage:
    """Counts every cell of the ticket once. Raises ValueError for unknown groups, codecs, and a block named twice."""

    def __init__(self, ticket: Ticket, pools: Mapping[GroupId, PoolAccess]) -> None:
        self._forms: dict[GroupId, tuple[PayloadForm, int]] = {}
        codec = codec_named(ticket.codec)
        self._arrived: dict[GroupId, dict[BlockId, int]] = {}
        self._masks: dict[tuple[GroupId, range, range], int] = {}
        self.missing_cells = 0
        for blocks in ticket.groups:
            if blocks.group not in pools or blocks.group in self._arrived:
                raise ValueError(f"the ticket names group {blocks.group}, which is unknown here or named twice")
            pool = pools[blocks.group]
            arrived = dict.fromkeys(blocks.blocks, 0)
            if len(arrived) != len(blocks.blocks):
                raise ValueError(f"the ticket names a block of group {blocks.group} twice")
            heads = pool.spec.heads_local(pool.tp)
            self._forms[blocks.group] = PayloadForm(pool.spec, codec), heads
            self._arrived[blocks.group] = arrived
            self.missing_cells += len(arrived) * len(pool.spec.layers) * heads

    @property
    def is_complete(self) -> bool:
        return self.missing_cells == 0

    def check(self, frame: Frame, payload_size: int) -> None:
        """Raise MalformedFrameError unless the frame lies inside the ticket and its payload has the right size."""
        if frame.group not in self._forms:
            raise MalformedFrameError(f"group {frame.group} is not in the ticket")
        form, heads = self._forms[frame.group]
        if frame.codec != form.codec:
            raise MalformedFrameError(f"codec {frame.codec.name} where the ticket says {form.codec.name}")
        if not is_within(frame.layers, len(form.spec.layers)) or not is_within(frame.heads, heads):
            raise MalformedFrameError(f"layers {frame.layers} or heads {frame.heads} lie outside group {frame.group}")
        if not self._arrived[frame.group].keys() >= set(frame.blocks):
            raise MalformedFrameError(f"a block of group {frame.group} that is not in the ticket")
        expected = form.payload_bytes(len(frame.blocks), frame.layers, frame.heads)
        if not payload_size == frame.payload_bytes == expected:
            raise MalformedFrameError(f"{payload_size} payload bytes where {expected} belong")

    def form(self, group: GroupId) -> PayloadForm:
        """How the payloads of one of the ticket's groups are written."""
        return self._forms[group][0]

    def has_new(self, frame: Frame) -> bool:
        """Whether the frame (checked before) brings any cell that has not arrived."""
        arrived, mask = self._arrived[frame.group], self._mask(frame)
        return any(mask & ~arrived[block] for block in frame.blocks)

    def mark(self, frame: Frame) -> int:
        """Note the frame's cells as arrived; the number of blocks that became complete by it."""
        form, heads = self._forms[frame.group]
        arrived, mask, full = self._arrived[frame.group], self._mask(frame), (1 << len(form.spec.layers) * heads) - 1
        completed = came = 0
        for block in frame.blocks:
            before = arrived[block]
            after = before | mask
            came += (after ^ before).bit_count()
            arrived[block] = after
            completed += after == full != before
        self.missing_cells -= came
        return completed

    def _mask(self, frame: Frame) -> int:
        """One bit a (layer, head), layers outermost. Most frames of a transfer have the same."""
        key = frame.group, frame.layers, frame.heads
        known = self._masks.get(key)
        if known is not None:
            return known
        heads = self._forms[frame.group][1]
        row = ((1 << len(frame.heads)) - 1) << frame.heads.start
        mask = 0
        for layer in frame.layers:
            mask |= row << layer * heads
        if len(self._masks) < _MOST_MASKS:
            self._masks[key] = mask
        return mask
