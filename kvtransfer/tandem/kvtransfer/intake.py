"""The receiving end without its sockets: which frames are accepted, where bytes land, when a transfer is verified.

Every open transfer has a lock; a frame is checked and written while it is held. `cancel` takes the same lock, so that
after its return no byte of that transfer can land.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.errors import TransferError
from tandem.core.ids import GroupId, Incarnation, Rank, TransferId
from tandem.core.logs import event
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.events import Failed, ReceiverEvent, Verified
from tandem.kvtransfer.frame import Frame, FrameKind, MalformedFrameError, Reply, ReplyKind, checksum
from tandem.kvtransfer.hostid import host_id, shares_clock
from tandem.kvtransfer.pool import PoolAccess
from tandem.kvtransfer.state import TransferPhase, TransferState
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports.base import Peer

DROP_REASONS = (
    "stale_attempt", "wrong_incarnation", "unknown_transfer", "fenced", "duplicate", "checksum", "malformed",
)  # fmt: skip
_TOMBSTONES = 8192
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InboundLink:
    """One authenticated connection from a peer's rank."""

    number: int
    peer: Peer
    shares_clock: bool


class Intake:
    """All transfers that this rank expects. Thread-safe; events go out with no lock held."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        rank: Rank,
        pools: Mapping[GroupId, PoolAccess],
        on_event: Callable[[ReceiverEvent], None],
        clock: Clock,
    ) -> None:
        self._incarnation, self._rank, self._pools = incarnation, rank, pools
        self._on_event, self._clock = on_event, clock
        self._host = host_id()
        self._link_numbers = itertools.count(1)
        self._lock = threading.Lock()  # guards the fields below, never held together with a transfer's lock
        self._transfers: dict[TransferId, _Incoming] = {}
        self._tombstones: OrderedDict[TransferId, bool] = OrderedDict()  # ended transfers: was it verified?
        self._counts: Counter[str] = Counter()

    def expect(self, ticket: Ticket) -> None:
        """Accept frames of `ticket` from now on; its blocks stay reserved until `admit` or after `cancel`.

        A ticket that has nothing to send is verified at once. Raises TransferError if the ticket was granted by
        another incarnation, ValueError if it contradicts the pools or is expected already.
        """
        incoming = _Incoming(ticket, Coverage(ticket, self._pools), TransferState(self._clock))
        with self._lock:
            if ticket.receiver_incarnation != self._incarnation:
                raise TransferError("the ticket was granted by another incarnation", todo="grant a new one")
            if ticket.transfer in self._transfers or ticket.transfer in self._tombstones:
                raise ValueError(f"transfer {ticket.transfer} is not new")
            self._transfers[ticket.transfer] = incoming
        if incoming.coverage.is_complete:
            with incoming.lock:
                incoming.state.to(TransferPhase.PUSHING)
                verified = self._verify(incoming, self._clock.now_s())
            self._on_event(verified)

    def admit(self, transfer: TransferId) -> None:
        """The request took over the verified blocks: drop the bookkeeping. Raises TransferError if not verified."""
        with self._lock:
            incoming = self._transfers.get(transfer)
        if incoming is None:
            raise TransferError(f"transfer {transfer} is not expected", todo="retry the request with a new attempt")
        with incoming.lock:
            if incoming.state.phase is not TransferPhase.VERIFIED:
                raise TransferError(f"transfer {transfer} is {incoming.state.phase}, not verified")
            incoming.state.to(TransferPhase.ADMITTED)
        self._bury(transfer, was_verified=True)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> None:
        """Fence and release: after return no byte of the transfer can land. Waits for one frame's copy at most.

        Frames that come later are dropped and counted. Does nothing for a transfer that is unknown or ended. An event
        decided before may still be on its way to the callback.
        """
        with self._lock:
            incoming = self._transfers.get(transfer)
        if incoming is None:
            return
        incoming.is_unwanted = True  # before the lock, so that no stream of frames can keep us from getting it
        with incoming.lock:
            was_verified = TransferPhase.VERIFIED in incoming.state.entered_s
            if incoming.state.can_be_given_up:
                incoming.state.cancel(reason)
            if incoming.state.phase in (TransferPhase.FAILED, TransferPhase.CANCELLED):
                incoming.state.to(TransferPhase.FENCED)
                incoming.state.to(TransferPhase.RELEASED)
        self._bury(transfer, was_verified=was_verified)

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation: every open transfer of the old one fails; after return no byte of them can land."""
        with self._lock:
            self._incarnation = incarnation
            stale = [t for t in self._transfers.values() if t.ticket.receiver_incarnation != incarnation]
        for incoming in stale:
            self._fail(incoming, "the receiver began a new incarnation")

    def counters(self) -> dict[str, int]:
        """`bytes`, `frames`, `blocks` received, `open` transfers, and `dropped_<reason>` frames."""
        with self._lock:
            names = ("bytes", "frames", "blocks", *(f"dropped_{reason}" for reason in DROP_REASONS))
            return {name: self._counts[name] for name in names} | {"open": len(self._transfers)}

    def connect(self, peer: Peer) -> InboundLink:
        """Note a new authenticated connection."""
        return InboundLink(next(self._link_numbers), peer, shares_clock(self._host, peer.host))

    def disconnect(self, link: InboundLink, reason: str) -> None:
        """The connection ended: the open transfers that came through it fail, and those that its peer was promised but
        never announced, for they may have been lost with it. Harmless when repeated."""
        with self._lock:
            affected = [t for t in self._transfers.values() if t.depends_on(link)]
        for incoming in affected:
            self._fail(incoming, f"the connection from {link.peer.worker} was lost: {reason}")

    def reject(self, link: InboundLink, error: MalformedFrameError) -> None:
        """Count a malformed frame; the transport closes the connection."""
        self._count(dropped_malformed=1)
        event(_log, "transfer_frame_malformed", logging.WARNING, peer=link.peer.worker, error=str(error))

    def accept(self, frame: Frame, payload: memoryview, link: InboundLink) -> Reply:
        """Judge one frame and write its payload. `payload` is borrowed for the call.

        Raises MalformedFrameError for a frame that contradicts its ticket.
        """
        arrived_s = self._clock.now_s()
        with self._lock:
            incoming = self._transfers.get(frame.transfer)
            was_verified = self._tombstones.get(frame.transfer)
            incarnation = self._incarnation
        if frame.dest_incarnation != incarnation:
            return self._drop(frame, "wrong_incarnation")
        if incoming is None:
            if was_verified:
                return self._after_verified(frame)
            return self._drop(frame, "unknown_transfer" if was_verified is None else "fenced")
        if frame.attempt != incoming.ticket.attempt:
            return self._drop(frame, "stale_attempt")
        if frame.source_incarnation != incoming.ticket.sender_incarnation:
            return self._drop(frame, "wrong_incarnation")
        if frame.dest_rank != self._rank:
            raise MalformedFrameError(f"a frame for rank {frame.dest_rank} came to rank {self._rank}")
        with incoming.lock:
            reply, outcome = self._judge(incoming, frame, payload, link, arrived_s)
        if outcome is not None:
            self._on_event(outcome)
        return reply

    def _judge(
        self, incoming: _Incoming, frame: Frame, payload: memoryview, link: InboundLink, arrived_s: float
    ) -> tuple[Reply, ReceiverEvent | None]:
        """The frame's fate, and the event that it causes; the transfer's lock is held."""
        state = incoming.state
        if state.phase in (TransferPhase.VERIFIED, TransferPhase.ADMITTED):
            return self._after_verified(frame), None
        if incoming.is_unwanted or not state.can_move_bytes:
            return self._drop(frame, "fenced", state.reason), None
        incoming.links.add(link.number)
        if frame.kind is FrameKind.DATA:
            sent_s = frame.send_ns / 1e9 if link.shares_clock else arrived_s
            return self._take(incoming, frame, payload, sent_s)
        if frame.kind is FrameKind.ABORT:
            return _reply(frame, ReplyKind.ACK), self._give_up(incoming, "the sender gave up")
        if frame.kind is FrameKind.FINISH:
            incoming.finished.add(frame.source_rank)
            if len(incoming.finished) >= frame.source_ranks:
                reason = f"the sender finished with {incoming.coverage.missing_cells} cells missing"
                return _reply(frame, ReplyKind.FAIL, reason), self._give_up(incoming, reason)
            incoming.links.discard(link.number)  # its part is here: losing it now harms nothing
            return _reply(frame, ReplyKind.DONE), None
        return _reply(frame, ReplyKind.ACK), None

    def _take(
        self, incoming: _Incoming, frame: Frame, payload: memoryview, sent_s: float
    ) -> tuple[Reply, ReceiverEvent | None]:
        """Check and write a data frame; the transfer's lock is held."""
        incoming.coverage.check(frame, len(payload))
        if not incoming.coverage.has_new(frame):
            self._count(dropped_duplicate=1)
            return _reply(frame, ReplyKind.ACK), None
        if checksum(payload) != frame.payload_crc:
            self._count(dropped_checksum=1)
            reason = f"checksum mismatch in group {frame.group}, layers {frame.layers.start}–{frame.layers.stop - 1}"
            return _reply(frame, ReplyKind.FAIL, reason), self._give_up(incoming, reason)
        if incoming.state.phase is TransferPhase.RESERVED:
            incoming.state.to(TransferPhase.PUSHING)
        self._pools[frame.group].write_from(frame.blocks, frame.layers, frame.heads, payload)
        incoming.bytes += len(payload)
        self._count(bytes=len(payload), frames=1, blocks=incoming.coverage.mark(frame))
        verified = self._verify(incoming, sent_s) if incoming.coverage.is_complete else None
        return _reply(frame, ReplyKind.ACK), verified

    def _verify(self, incoming: _Incoming, sent_s: float) -> Verified:
        """Everything is here and every checksum held; the transfer's lock is held."""
        incoming.state.to(TransferPhase.COMPLETE)
        incoming.state.to(TransferPhase.VERIFIED)
        now_s = self._clock.now_s()
        wire_s = max(0.0, now_s - sent_s)
        return Verified(
            transfer=incoming.ticket.transfer, last_wire_s=wire_s, verified_at_s=now_s, bytes=incoming.bytes
        )

    def _after_verified(self, frame: Frame) -> Reply:
        """A frame of a transfer that has all it needs: nothing is written any more."""
        if frame.kind is FrameKind.DATA:
            self._count(dropped_duplicate=1)
        return _reply(frame, ReplyKind.DONE if frame.kind is FrameKind.FINISH else ReplyKind.ACK)

    def _drop(self, frame: Frame, reason: str, detail: str = "") -> Reply:
        self._count(**{f"dropped_{reason}": 1})
        return _reply(frame, ReplyKind.FAIL, f"{reason}: {detail}" if detail else reason)

    def _fail(self, incoming: _Incoming, reason: str) -> None:
        incoming.is_unwanted = True
        with incoming.lock:
            failed = self._give_up(incoming, reason) if incoming.state.can_move_bytes else None
        if failed is not None:
            self._on_event(failed)

    def _give_up(self, incoming: _Incoming, reason: str) -> Failed:
        incoming.state.fail(reason)
        event(_log, "transfer_failed", logging.WARNING, transfer=incoming.ticket.transfer, reason=reason)
        return Failed(transfer=incoming.ticket.transfer, reason=reason)

    def _bury(self, transfer: TransferId, *, was_verified: bool) -> None:
        with self._lock:
            self._transfers.pop(transfer, None)
            self._tombstones[transfer] = was_verified
            while len(self._tombstones) > _TOMBSTONES:
                self._tombstones.popitem(last=False)

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)


class _Incoming:
    """One expected transfer; `lock` guards the rest and every write into its blocks."""

    def __init__(self, ticket: Ticket, coverage: Coverage, state: TransferState) -> None:
        self.ticket, self.coverage, self.state = ticket, coverage, state
        self.lock = threading.Lock()
        self.is_unwanted = False
        self.links: set[int] = set()
        self.finished: set[Rank] = set()
        self.bytes = 0

    def depends_on(self, link: InboundLink) -> bool:
        """Whether it came through `link`, or through none yet and is promised to the peer behind it."""
        is_unheard_of = not self.links and not self.finished
        promised = self.ticket.sender, self.ticket.sender_incarnation
        return link.number in self.links or (is_unheard_of and promised == (link.peer.worker, link.peer.incarnation))


def _reply(frame: Frame, kind: ReplyKind, reason: str = "") -> Reply:
    return Reply(kind=kind, transfer=frame.transfer, attempt=frame.attempt, reason=reason)
