"""The receiving end without its sockets: accepts frames, places their bytes and verifies transfers.

Every open transfer has a lock; a frame is checked and written while it is held. `cancel` takes the same lock, so that
after its return no byte of that transfer can land.

Header, place and size are judged before a byte is written; the payload's checksum is taken in the pass that writes it,
into blocks that are reserved and not read before the transfer is verified. One wrong checksum ends the attempt.
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
from tandem.core.ids import GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.label_limiter import BoundedLabel
from tandem.core.logs import event
from tandem.core.metric_names import KV_CHECKSUM_FAILURES, counter_key
from tandem.kernels import kv_payload
from tandem.kvtransfer import frame_checks
from tandem.kvtransfer.coverage import Coverage
from tandem.kvtransfer.device_payload import DevicePayload, Payload
from tandem.kvtransfer.events import Failed, ReceiverEvent, Verified
from tandem.kvtransfer.frame import Checksum, Frame, FrameKind, FrameReply, MalformedFrameError, ReplyKind
from tandem.kvtransfer.host_id import host_id, shares_clock
from tandem.kvtransfer.kv_pool_access import PoolAccess
from tandem.kvtransfer.state import OpenTransfer, TransferPhase, TransferState
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.wire_codec import PayloadForm

DROP_REASONS = (
    "stale_attempt", "wrong_incarnation", "foreign", "unknown_transfer", "fenced", "duplicate", "withdrawn",
    "checksum", "malformed",
)  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InboundLink:
    """One authenticated connection from a peer's rank."""

    number: int
    peer: Peer
    shares_clock: bool


class ReceiverCore:
    """All transfers that this rank expects. Thread-safe; events go out with no lock held."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        rank: Rank,
        pools: Mapping[GroupId, PoolAccess],
        on_event: Callable[[ReceiverEvent], None],
        clock: Clock,
        tombstones: int = 8192,
    ) -> None:
        """`tombstones`: how many ended transfers are remembered, to distinguish late frames from frames that were never
        expected."""
        self._incarnation, self._rank, self._pools = incarnation, rank, pools
        self._max_tombstones = tombstones
        self._on_event, self._clock = on_event, clock
        self._host = host_id()
        self._link_numbers = itertools.count(1)
        self._kept = threading.local()  # a link thread's memory for what came in a codec
        # Guards the fields below; taken inside a transfer's lock, never the other way round.
        self._lock = threading.Lock()
        self._transfers: dict[TransferId, _Incoming] = {}
        self._tombstones: OrderedDict[TransferId, bool] = OrderedDict()  # ended transfers: was it verified?
        self._revoked: OrderedDict[TransferId, None] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._senders = BoundedLabel()
        self._damaged: Counter[str] = Counter()  # frames with a wrong checksum, by sender

    def expect(self, ticket: Ticket) -> None:
        """Accept frames of `ticket` from now on; its blocks stay reserved until `admit` or after `cancel`.

        A ticket that has nothing to send is verified at once. Raises TransferError if the ticket was granted by
        another incarnation, ValueError if it contradicts the pools or is expected already.
        """
        incoming = _Incoming(ticket, Coverage(ticket, self._pools), TransferState(self._clock))
        verified = None
        if incoming.coverage.is_complete:  # decided before another thread knows of it, and could fail it
            incoming.state.to(TransferPhase.PUSHING)
            verified = self._verify(incoming, self._clock.now_s())
        with self._lock:
            if ticket.receiver_incarnation != self._incarnation:
                raise TransferError("the ticket was granted by another incarnation", todo="grant a new one")
            if ticket.transfer in self._transfers or ticket.transfer in self._tombstones:
                raise ValueError(f"transfer {ticket.transfer} is not new")
            self._transfers[ticket.transfer] = incoming
        if verified is not None:
            self._on_event(verified)

    def admit(self, transfer: TransferId) -> None:
        """Drop the bookkeeping once the request took over the verified blocks. Raises TransferError if not verified."""
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
        incoming.is_unwanted = True  # before the lock, so that no stream of frames can keep us from acquiring it
        with incoming.lock:
            was_verified = TransferPhase.VERIFIED in incoming.state.entered_s
            if incoming.state.can_be_given_up:
                incoming.state.cancel(reason)
            if incoming.state.phase in (TransferPhase.FAILED, TransferPhase.CANCELLED):
                incoming.state.to(TransferPhase.FENCED)
                incoming.state.to(TransferPhase.RELEASED)
        self._bury(transfer, was_verified=was_verified)

    def revoke(self, transfer: TransferId, *, even_if_begun: bool = False) -> bool:
        """Take back an unused promise: like `cancel`, but only if not a byte came for it yet.

        Frames that come later are dropped and counted, but not answered as failures: the owner notifies the sender,
        which then pushes the same blocks under another ticket. False, and nothing changed, if it is too late for that.
        `even_if_begun`: take it back even with some of its bytes here, because another rank of the worker had none.
        """
        with self._lock:
            incoming = self._transfers.get(transfer)
        if incoming is None:
            return False
        with incoming.lock:
            is_begun = incoming.state.phase is TransferPhase.PUSHING
            if incoming.state.phase is not TransferPhase.RESERVED and not (even_if_begun and is_begun):
                return False
            incoming.is_unwanted = incoming.is_revoked = True
            incoming.state.cancel("revoked")
            incoming.state.to(TransferPhase.FENCED)
            incoming.state.to(TransferPhase.RELEASED)
        with self._lock:
            self._revoked[transfer] = None
            while len(self._revoked) > self._max_tombstones:
                self._revoked.popitem(last=False)
        self._bury(transfer, was_verified=False)
        return True

    def transfers(self) -> list[OpenTransfer]:
        """Every open transfer: nothing lands for one that is not listed."""
        with self._lock:
            expected = list(self._transfers.values())
        return [OpenTransfer(t.ticket, t.state.phase, t.state.age_s(), t.bytes) for t in expected]

    def set_incarnation(self, incarnation: Incarnation) -> None:
        """Begin a new incarnation: every open transfer of the old one fails; after return no byte of them can land."""
        with self._lock:
            self._incarnation = incarnation
            stale = [t for t in self._transfers.values() if t.ticket.receiver_incarnation != incarnation]
        for incoming in stale:
            self._fail(incoming, "the receiver began a new incarnation")

    def counters(self) -> dict[str, int]:
        """`bytes`, `frames`, `blocks` received, `probes`, `open` transfers, and `dropped_<reason>` frames; those that
        were damaged by sender, too, under the metric's name."""
        with self._lock:
            names = ("bytes", "frames", "blocks", "probes", *(f"dropped_{reason}" for reason in DROP_REASONS))
            damaged = {counter_key(KV_CHECKSUM_FAILURES, peer=peer): count for peer, count in self._damaged.items()}
            return {name: self._counts[name] for name in names} | {"open": len(self._transfers)} | damaged

    def connect(self, peer: Peer) -> InboundLink:
        """Note a new authenticated connection."""
        return InboundLink(next(self._link_numbers), peer, shares_clock(self._host, peer.host))

    def disconnect(self, link: InboundLink, reason: str) -> None:
        """The connection ended: the open transfers that came through it fail, and those that its peer was promised but
        never announced, for they may have been lost with it.

        To be called once, when nothing of it can arrive any more: a second time could hit what was promised since."""
        with self._lock:
            affected = [t for t in self._transfers.values() if t.depends_on(link)]
        for incoming in affected:
            self._fail(incoming, f"the connection from {link.peer.worker} was lost: {reason}")

    def reject(self, link: InboundLink, error: MalformedFrameError) -> None:
        """Count a malformed frame; the transport closes the connection."""
        self._count("dropped_malformed")
        event(_log, "transfer_frame_malformed", logging.WARNING, peer=link.peer.worker, error=str(error))

    def accept(self, frame: Frame, payload: Payload, link: InboundLink) -> FrameReply:
        """Judge one frame and write its payload. `payload` is borrowed for the call.

        Raises MalformedFrameError for a frame that contradicts its ticket.
        """
        if frame.checksum is not Checksum.CRC32 and not isinstance(payload, DevicePayload):
            raise MalformedFrameError(f"checksum {frame.checksum.name} on a link that supports CRC-32 only")
        if frame.kind is FrameKind.PROBE:
            return self._probed(frame, payload, link)
        arrived_s = self._clock.now_s()
        with self._lock:
            incoming = self._transfers.get(frame.transfer)
            was_verified = self._tombstones.get(frame.transfer)
            is_revoked = frame.transfer in self._revoked
            incarnation = self._incarnation
        if not frame_checks.is_for(frame, incarnation):
            return self._drop(frame, "wrong_incarnation")
        if is_revoked:
            self._count("dropped_fenced")
            return _reply(frame, ReplyKind.ACK)
        if incoming is None:
            if was_verified:
                return self._after_verified(frame)
            return self._drop(frame, "unknown_transfer" if was_verified is None else "fenced")
        if not frame_checks.is_of_attempt(frame, incoming.ticket):
            return self._drop(frame, "stale_attempt")
        if not frame_checks.is_from(frame, incoming.ticket):
            return self._drop(frame, "wrong_incarnation")
        if not frame_checks.is_of_sender(link.peer.worker, incoming.ticket):
            return self._drop(frame, "foreign")
        if frame.dest_rank != self._rank:
            raise MalformedFrameError(f"a frame for rank {frame.dest_rank} came to rank {self._rank}")
        with incoming.lock:
            reply, outcome = self._judge(incoming, frame, payload, link, arrived_s)
        if outcome is not None:
            self._on_event(outcome)
        return reply

    def _judge(
        self, incoming: _Incoming, frame: Frame, payload: Payload, link: InboundLink, arrived_s: float
    ) -> tuple[FrameReply, ReceiverEvent | None]:
        """Return the reply to a frame, and the event that it causes; the transfer's lock is held."""
        state = incoming.state
        if state.phase in (TransferPhase.VERIFIED, TransferPhase.ADMITTED):
            return self._after_verified(frame), None
        if incoming.is_revoked:
            self._count("dropped_fenced")
            return _reply(frame, ReplyKind.ACK), None
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
        self, incoming: _Incoming, frame: Frame, payload: Payload, sent_s: float
    ) -> tuple[FrameReply, ReceiverEvent | None]:
        """Check and write a data frame; the transfer's lock is held."""
        incoming.coverage.check(frame, len(payload))
        if not incoming.coverage.has_new(frame):
            self._count("dropped_duplicate")
            return _reply(frame, ReplyKind.ACK), None
        if incoming.state.phase is TransferPhase.RESERVED:
            incoming.state.to(TransferPhase.PUSHING)
        crc = self._write(incoming.coverage.form(frame.group), frame, payload)
        if not frame_checks.is_current(
            payload
        ):  # checked after the last byte was read: bytes read before that were its own
            self._count("dropped_withdrawn")
            return _reply(frame, ReplyKind.FAIL, "withdrawn"), self._give_up(incoming, "the sender gave up")
        if not frame_checks.is_intact(frame, crc):
            self._count("dropped_checksum")
            self._note_damage(incoming.ticket.sender)
            reason = f"checksum mismatch in group {frame.group}, layers {frame.layers.start}–{frame.layers.stop - 1}"
            return _reply(frame, ReplyKind.FAIL, reason), self._give_up(incoming, reason)
        incoming.bytes += len(payload)
        completed = incoming.coverage.mark(frame)
        with self._lock:
            self._counts["bytes"] += len(payload)
            self._counts["frames"] += 1
            self._counts["blocks"] += completed
        verified = self._verify(incoming, sent_s) if incoming.coverage.is_complete else None
        return _reply(frame, ReplyKind.ACK), verified

    def _write(self, form: PayloadForm, frame: Frame, payload: Payload) -> int:
        """Scatter a payload that fits; its checksum. What came in a codec is decoded only if that is right."""
        pool = self._pools[frame.group]
        if not form.codec:
            if isinstance(payload, memoryview):
                return pool.write_from(frame.blocks, frame.layers, frame.heads, payload)
            if payload.suits(pool):
                return payload.scatter(pool, frame.blocks, frame.layers, frame.heads, frame.checksum)
        if isinstance(payload, DevicePayload):
            crc, own = payload.checksum(frame.checksum), None
        else:  # a copy: the decoded bytes are the summed ones, even if the sender still writes their source
            own = self._room("payload", len(payload))
            crc = kv_payload.copy(payload, own)
        if frame_checks.is_intact(frame, crc):
            data = payload.to_host() if isinstance(payload, DevicePayload) else own
            assert data is not None
            if form.codec:
                data = form.decode(data, self._room("numbers", form.plain_bytes(len(data))))
            pool.write_from(frame.blocks, frame.layers, frame.heads, data)
        return crc

    def _room(self, name: str, size: int) -> memoryview:
        """Memory of this thread, kept for its next frames."""
        room: bytearray | None = getattr(self._kept, name, None)
        if room is None or len(room) < size:
            room = bytearray(size)
            setattr(self._kept, name, room)
        return memoryview(room)[:size]

    def _probed(self, frame: Frame, payload: Payload, link: InboundLink) -> FrameReply:
        """Check and drop bytes that measure the link. Raises MalformedFrameError for a wrong size."""
        if len(payload) != frame.payload_bytes:
            raise MalformedFrameError(f"{len(payload)} payload bytes, expected {frame.payload_bytes}")
        if not frame_checks.is_intact(frame, _checksum(frame, payload)):
            self._note_damage(link.peer.worker)
            return self._drop(frame, "checksum")
        self._count("probes")
        return _reply(frame, ReplyKind.ACK)

    def _verify(self, incoming: _Incoming, sent_s: float) -> Verified:
        """Verify: everything is here and every checksum held. The transfer's lock is held, or no other thread has it
        yet."""
        incoming.state.to(TransferPhase.COMPLETE)
        incoming.state.to(TransferPhase.VERIFIED)
        now_s = self._clock.now_s()
        wire_s = max(0.0, now_s - sent_s)
        return Verified(
            transfer=incoming.ticket.transfer, last_wire_s=wire_s, verified_at_s=now_s, bytes=incoming.bytes
        )

    def _after_verified(self, frame: Frame) -> FrameReply:
        """Answer a frame of a transfer that has all it needs: nothing is written any more."""
        if frame.kind is FrameKind.DATA:
            self._count("dropped_duplicate")
        return _reply(frame, ReplyKind.DONE if frame.kind is FrameKind.FINISH else ReplyKind.ACK)

    def _drop(self, frame: Frame, reason: str, detail: str = "") -> FrameReply:
        self._count(f"dropped_{reason}")
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
            while len(self._tombstones) > self._max_tombstones:
                self._tombstones.popitem(last=False)

    def _note_damage(self, sender: WorkerId) -> None:
        with self._lock:
            self._damaged[self._senders.of(sender)] += 1

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class _Incoming:
    """One expected transfer; `lock` guards the rest and every write into its blocks."""

    def __init__(self, ticket: Ticket, coverage: Coverage, state: TransferState) -> None:
        self.ticket, self.coverage, self.state = ticket, coverage, state
        self.lock = threading.Lock()
        self.is_unwanted = False
        self.is_revoked = False
        self.links: set[int] = set()
        self.finished: set[Rank] = set()
        self.bytes = 0

    def depends_on(self, link: InboundLink) -> bool:
        """True if it came through `link`, or through none yet and is promised to the peer behind it."""
        is_unheard_of = not self.links and not self.finished
        promised = self.ticket.sender, self.ticket.sender_incarnation
        return link.number in self.links or (is_unheard_of and promised == (link.peer.worker, link.peer.incarnation))


def _checksum(frame: Frame, payload: Payload) -> int:
    """Checksum of the kind that the frame names."""
    return payload.checksum(frame.checksum) if isinstance(payload, DevicePayload) else kv_payload.crc32(payload)


def _reply(frame: Frame, kind: ReplyKind, reason: str = "") -> FrameReply:
    return FrameReply(kind=kind, transfer=frame.transfer, attempt=frame.attempt, reason=reason)
