"""The sender's record of one transfer. Pure bookkeeping under one lock; no links, no threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from tandem.core.clock import Clock
from tandem.core.ids import Attempt, BlockId, GroupId, Rank, TransferId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.events import Quiesced, SendCompleted, SenderEvent, SendFailed
from tandem.kvtransfer.frame import Frame, FrameKind
from tandem.kvtransfer.head_routes import HeadRoute, feeders, head_routes
from tandem.kvtransfer.kv_pool_access import PoolAccess
from tandem.kvtransfer.state import OpenTransfer, TransferPhase, TransferState
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.wire_codec import PayloadForm, codec_named


class Outgoing:
    """`lock` guards the state and is held while the source is read: once a caller has ended the transfer under it,
    nothing reads the source any more. Each method that ends it returns the one event to report, or None."""

    def __init__(self, ticket: Ticket, pools: Mapping[GroupId, PoolAccess], rank: Rank, clock: Clock) -> None:
        """Raises ValueError if the ticket contradicts the pools."""
        dest_ranks = sorted({endpoint.rank for endpoint in ticket.endpoints})
        if not dest_ranks or dest_ranks != list(range(len(dest_ranks))):
            raise ValueError(f"the ticket's endpoints are those of ranks {dest_ranks}")
        unknown = [blocks.group for blocks in ticket.groups if blocks.group not in pools]
        if unknown:
            raise ValueError(f"the ticket names unknown groups {unknown}")
        self.ticket, self._rank = ticket, rank
        self.lock = threading.Lock()
        self.bytes = 0
        self.is_finishing = False
        self.is_unwanted = False  # set before the lock is acquired, so that no stream of frames can delay an end
        self._state = TransferState(clock)
        dest_tp = len(dest_ranks)
        named = {blocks.group: pools[blocks.group] for blocks in ticket.groups}
        source_tp = next((pool.tp for pool in pools.values()), 1)
        specs = [pool.spec for pool in named.values()]
        self._source_ranks = {r: feeders(specs, source_tp, dest_tp, r) for r in dest_ranks}
        self.routes: dict[GroupId, tuple[HeadRoute, ...]] = {
            group: head_routes(pool.spec, pool.tp, rank, dest_tp) for group, pool in named.items()
        }
        self.forms: dict[GroupId, PayloadForm] = _forms(ticket, named, dest_tp)
        self.dest_ranks = tuple(Rank(r) for r in dest_ranks if rank in self._source_ranks[r])
        self._dest_blocks: dict[GroupId, frozenset[BlockId]] = {g.group: frozenset(g.blocks) for g in ticket.groups}
        self._unfinished = set(self.dest_ranks)  # FINISH not sent yet
        self._waiting = set(self.dest_ranks)  # DONE not received yet
        self._withdrawals: set[Callable[[TransferId, Attempt], None]] = set()

    @property
    def can_move_bytes(self) -> bool:
        return self._state.can_move_bytes and not self.is_unwanted

    def snapshot(self) -> OpenTransfer:
        """Snapshot of the transfer and its progress."""
        return OpenTransfer(self.ticket, self._state.phase, self._state.age_s(), self.bytes)

    def is_promised(self, group: GroupId, blocks: frozenset[BlockId]) -> bool:
        """True if the ticket reserved all of `blocks`."""
        return group in self._dest_blocks and blocks <= self._dest_blocks[group]

    def frame(self, kind: FrameKind, dest_rank: Rank, **fields: Any) -> Frame:
        """Make a frame of this transfer; `fields` are those that only data frames have. Adding them afterwards would
        make each frame twice, which is 5 % of the time of a frame over TCP."""
        ticket = self.ticket
        return Frame(
            kind=kind, transfer=ticket.transfer, attempt=ticket.attempt, source_incarnation=ticket.sender_incarnation,
            dest_incarnation=ticket.receiver_incarnation, source_rank=self._rank,
            source_ranks=len(self._source_ranks[dest_rank]), dest_rank=dest_rank, **fields,
        )  # fmt: skip

    def begin(self) -> None:
        """The first frame is about to leave; `lock` is held."""
        if self._state.phase is TransferPhase.RESERVED:
            self._state.to(TransferPhase.PUSHING)

    def at_fence(self, withdraw: Callable[[TransferId, Attempt], None]) -> None:
        """Register a call for when this transfer is given up: under `lock`, once, however often named; `lock` is
        held."""
        self._withdrawals.add(withdraw)

    def note_finish(self, dest_rank: Rank) -> None:
        """All frames for `dest_rank` were handed over; `lock` is held and bytes may move."""
        self.begin()
        self._unfinished.discard(dest_rank)
        if not self._unfinished:
            self._state.to(TransferPhase.COMPLETE)

    def done(self, dest_rank: Rank) -> SenderEvent | None:
        """`dest_rank` has verified what this rank sent."""
        with self.lock:
            self._waiting.discard(dest_rank)
            return self._conclude()

    def finish_unfed(self) -> SenderEvent | None:
        """End a transfer for which this rank has nothing to send: done as soon as it is finished."""
        with self.lock:
            if self._state.can_move_bytes and not self.dest_ranks:
                self.begin()
                self._state.to(TransferPhase.COMPLETE)
            return self._conclude()

    def fail(self, reason: str) -> SendFailed | None:
        """Fail after an error; waits for a read in progress."""
        self.is_unwanted = True
        with self.lock:
            if not self._state.can_be_given_up:
                return None
            self._state.fail(reason)
            self._release()
            return SendFailed(transfer=self.ticket.transfer, reason=reason)

    def cancel(self) -> Quiesced | None:
        """Cancel an unwanted transfer; waits for a read in progress."""
        self.is_unwanted = True
        with self.lock:
            if not self._state.can_be_given_up:
                return None
            self._state.cancel("cancelled")
            self._release()
            return Quiesced(transfer=self.ticket.transfer)

    def _conclude(self) -> SendCompleted | None:
        if self._waiting or self._state.phase is not TransferPhase.COMPLETE:
            return None
        self._state.to(TransferPhase.VERIFIED)
        self._state.to(TransferPhase.ADMITTED)
        return SendCompleted(transfer=self.ticket.transfer, bytes=self.bytes)

    def _release(self) -> None:
        for withdraw in self._withdrawals:
            withdraw(self.ticket.transfer, self.ticket.attempt)
        self._state.to(TransferPhase.FENCED)
        self._state.to(TransferPhase.RELEASED)


def _forms(ticket: Ticket, pools: Mapping[GroupId, PoolAccess], dest_tp: int) -> dict[GroupId, PayloadForm]:
    """How each group's payloads are to be written. Raises ValueError if the receiver's KV is of another shape."""
    codec, layout = codec_named(ticket.codec), ticket.layout
    if layout.tp != dest_tp:
        raise ValueError(f"the ticket's layout is for {layout.tp} ranks, its endpoints are those of {dest_tp}")
    theirs = {spec.group: spec for spec in layout.groups}
    for group, pool in pools.items():
        if group not in theirs or _shape(theirs[group]) != _shape(pool.spec):
            raise ValueError(f"group {group} has another shape at the receiver")
    return {group: PayloadForm(theirs[group], codec) for group in pools}


def _shape(spec: KVGroupSpec) -> tuple[object, ...]:
    return len(spec.layers), spec.planes, spec.heads, spec.width, spec.is_replicated
