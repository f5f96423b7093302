"""Records the cells (group, block, layer, head) of a ticket that have arrived on this rank. Moves no bytes.

Not thread-safe. Most frames bring a run of the ticket's blocks, in its order, each with the same cells: such a run is
judged as a whole, anything else block by block, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.frame import Frame, MalformedFrameError
from tandem.kvtransfer.kv_pool_access import PoolAccess, is_within
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire_codec import PayloadForm, codec_named

_MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers and heads that frames name: one bit a (layer, head), layers outermost, and their bytes in each block."""

    mask: int
    block_bytes: int


class _Group:
    """A ticket's blocks of one group, and a mask of arrived cells for each, in the ticket's order."""

    def __init__(self, pool: PoolAccess, form: PayloadForm, blocks: tuple[BlockId, ...]) -> None:
        self.form, self.blocks = form, blocks
        self.places = dict(zip(blocks, range(len(blocks)), strict=True))
        self.arrived = [0] * len(blocks)
        self._layers, self._heads = len(pool.spec.layers), pool.spec.heads_local(pool.tp)
        self.full = (1 << self._layers * self._heads) - 1
        self._parts: dict[tuple[range, range], _Part] = {}
        self._asked: tuple[tuple[BlockId, ...], slice | None] = (), None

    def part(self, layers: range, heads: range) -> _Part | None:
        """Return the part, or None if it lies outside the group. Most frames of a transfer have the same."""
        known = self._parts.get((layers, heads))
        if known is not None or not is_within(layers, self._layers) or not is_within(heads, self._heads):
            return known
        row, mask = ((1 << len(heads)) - 1) << heads.start, 0
        for layer in layers:
            mask |= row << layer * self._heads
        made = _Part(mask, self.form.payload_bytes(1, layers, heads))
        if len(self._parts) < _MOST_PARTS:
            self._parts[layers, heads] = made
        return made

    def run(self, blocks: tuple[BlockId, ...]) -> slice | None:
        """Return the places of `blocks` in the ticket's order if they are contiguous. Called several times a frame."""
        if blocks is not self._asked[0]:
            first = self.places.get(blocks[0]) if blocks else None
            where = slice(0) if first is None else slice(first, first + len(blocks))
            self._asked = blocks, where if blocks and self.blocks[where] == blocks else None
        return self._asked[1]

    def held(self, run: slice) -> int | None:
        """Return the mask of arrived cells if it is the same for all blocks of a run."""
        held = self.arrived[run]
        return held[0] if held.count(held[0]) == len(held) else None


class Coverage:
    """Counts every cell of the ticket once. Raises ValueError for unknown groups, codecs, and a block named twice."""

    def __init__(self, ticket: Ticket, pools: Mapping[GroupId, PoolAccess]) -> None:
        codec = codec_named(ticket.codec)
        self._groups: dict[GroupId, _Group] = {}
        self.missing_cells = 0
        for named in ticket.groups:
            if named.group not in pools or named.group in self._groups:
                raise ValueError(f"the ticket names group {named.group}, which is unknown here or named twice")
            pool = pools[named.group]
            group = _Group(pool, PayloadForm(pool.spec, codec), tuple(named.blocks))
            if len(group.places) != len(group.blocks):
                raise ValueError(f"the ticket names a block of group {named.group} twice")
            self._groups[named.group] = group
            self.missing_cells += len(group.blocks) * group.full.bit_count()

    @property
    def is_complete(self) -> bool:
        return self.missing_cells == 0

    def check(self, frame: Frame, payload_size: int) -> None:
        """Raise MalformedFrameError unless the frame lies inside the ticket and its payload has the right size."""
        group = self._groups.get(frame.group)
        if group is None:
            raise MalformedFrameError(f"group {frame.group} is not in the ticket")
        if frame.codec != group.form.codec:
            raise MalformedFrameError(f"codec {frame.codec.name}, but the ticket has {group.form.codec.name}")
        part = group.part(frame.layers, frame.heads)
        if part is None:
            raise MalformedFrameError(f"layers {frame.layers} or heads {frame.heads} lie outside group {frame.group}")
        if group.run(frame.blocks) is None and not group.places.keys() >= set(frame.blocks):
            raise MalformedFrameError(f"a block of group {frame.group} that is not in the ticket")
        expected = part.block_bytes * len(frame.blocks)
        if not payload_size == frame.payload_bytes == expected:
            raise MalformedFrameError(f"{payload_size} payload bytes, expected {expected}")

    def form(self, group: GroupId) -> PayloadForm:
        """How the payloads of one of the ticket's groups are written."""
        return self._groups[group].form

    def has_new(self, frame: Frame) -> bool:
        """True if the frame (checked before) brings any cell that has not arrived."""
        group, mask = self._of(frame)
        run = group.run(frame.blocks)
        if run is not None and (held := group.held(run)) is not None:
            return bool(mask & ~held)
        return any(mask & ~group.arrived[group.places[block]] for block in frame.blocks)

    def mark(self, frame: Frame) -> int:
        """Record the frame's cells as arrived; return the number of blocks that became complete by it."""
        group, mask = self._of(frame)
        blocks, run = frame.blocks, group.run(frame.blocks)
        if run is not None and (held := group.held(run)) is not None:
            group.arrived[run] = [held | mask] * len(blocks)
            came, is_complete = _change(held, mask, group.full)
            self.missing_cells -= came * len(blocks)
            return len(blocks) if is_complete else 0
        completed = 0
        for place in [group.places[block] for block in blocks]:
            came, is_complete = _change(group.arrived[place], mask, group.full)
            group.arrived[place] |= mask
            self.missing_cells -= came
            completed += is_complete
        return completed

    def _of(self, frame: Frame) -> tuple[_Group, int]:
        """A checked frame's group, and its cells of each block."""
        group = self._groups[frame.group]
        part = group.part(frame.layers, frame.heads)
        assert part is not None
        return group, part.mask


def _change(before: int, mask: int, full: int) -> tuple[int, bool]:
    """Cells that `mask` adds to a block, and whether it becomes complete by them."""
    after = before | mask
    return (after ^ before).bit_count(), after == full != before
