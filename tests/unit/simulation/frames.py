"""One sender's `Outgoing`s and one receiver's `ReceiverCore`, with frames that fly for as long as a test likes.

Transfer ids are few and the receiver forgets at once what has ended, so that a late frame meets another transfer under
its number: of another attempt, or of another incarnation of either end. Each transfer has its own content, so whatever
lands in the wrong place shows at the latest when a transfer is verified.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.kvtransfer.device_payload import DevicePayload
from tandem.kvtransfer.events import Failed, SenderEvent, Verified
from tandem.kvtransfer.frame import (
    Checksum,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    encode,
)
from tandem.kvtransfer.jobs import Control, FrameWriter, Push
from tandem.kvtransfer.kv_pool_access import HostPool, PoolAccess, TokenRun
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.state import TransferPhase
from tandem.kvtransfer.ticket import Endpoint, GroupBlocks, Ticket
from tandem.kvtransfer.transports.base import Peer
from tests.unit.simulation.memory import Packet

GROUP = GroupId(0)
SPEC = KVGroupSpec(group=GROUP, layers=(0, 1), planes=2, heads=2, width=2, block_tokens=2, dtype="float16")
BLOCKS = 6
FRAME_BYTES = SPEC.planes * SPEC.heads * SPEC.head_bytes()
"""A frame holds one layer of one block."""
Name = tuple[int, int, int, int]
"""Transfer id, attempt, incarnation of the sender, incarnation of the receiver."""


class Capture:
    """A link that keeps what is sent."""

    transport = "capture"
    stalls = 0

    def __init__(self, flying: list[Packet], max_payload_bytes: int) -> None:
        self._flying, self.max_payload_bytes = flying, max_payload_bytes

    def reserve(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        self._flying.append((encode(frame), bytes(payload or b"")))

    def replies(self) -> Iterator[FrameReply]:
        raise AssertionError("replies are delivered by hand")

    def close(self) -> None:
        return

    def release(self) -> None:
        return


class Withdrawn(DevicePayload):
    """A payload in memory that the sender has given to another owner."""

    is_withdrawn = True

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __len__(self) -> int:
        return len(self._content)

    def suits(self, pool: PoolAccess) -> bool:
        return True

    def scatter(self, pool: PoolAccess, blocks: Sequence[BlockId], layers: range, heads: range, kind: Checksum) -> int:
        return pool.write_from(blocks, layers, heads, memoryview(self._content))

    def checksum(self, kind: Checksum) -> int:
        return zlib.crc32(self._content)

    def to_host(self) -> memoryview:
        return memoryview(self._content)


@dataclass
class Sending:
    """One transfer at the sender: what is still to be sent, and how it ended."""

    name: Name
    outgoing: Outgoing
    frames: Iterator[None]
    outcome: SenderEvent | None = None


@dataclass
class Expected:
    """One transfer that the receiver has promised blocks to; its owner cancels or admits it in the end."""

    name: Name
    ticket: Ticket
    content: bytes
    outcome: str = ""

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return self.ticket.groups[0].blocks


class Pair:
    """Both ends. If a method breaks anything, it or the next `check` raises AssertionError."""

    def __init__(self) -> None:
        self._clock = ManualClock(10.0)
        self._memory = bytearray(BLOCKS * SPEC.block_bytes())
        self._sender_incarnation, self._receiver_incarnation = Incarnation(1), Incarnation(101)
        self.intake = ReceiverCore(
            incarnation=self._receiver_incarnation, rank=Rank(0), on_event=self._on_event, clock=self._clock,
            pools={GROUP: HostPool(SPEC, 1, memoryview(self._memory))}, tombstones=0,
        )  # fmt: skip
        self._link = self._connect()
        self.expected: dict[int, Expected] = {}
        self.sendings: list[Sending] = []
        self.flying: list[Packet] = []
        self.replies: list[FrameReply] = []
        self.verified = 0
        self._names: set[Name] = set()
        self._settled, self._promised = self._image(), set[BlockId]()

    # ---- what can happen -------------------------------------------------------------------------------------------

    def begin(self, number: int, blocks: tuple[int, ...], attempt: int) -> None:
        """The receiver promises free blocks, under a name that is new; the sender opens the transfer."""
        name = (number, attempt, self._sender_incarnation, self._receiver_incarnation)
        taken = {block for other in self.expected.values() for block in other.blocks}
        if number in self.expected or taken & set(blocks) or name in self._names:
            return
        self._names.add(name)
        ticket = Ticket(
            transfer=TransferId(number), request=RequestId("r"), attempt=Attempt(attempt), sender=WorkerId("p"),
            sender_incarnation=self._sender_incarnation, receiver=WorkerId("d"),
            receiver_incarnation=self._receiver_incarnation,
            groups=(GroupBlocks(group=GROUP, skip=0, blocks=tuple(map(BlockId, blocks))),),
            endpoints=(Endpoint(rank=Rank(0), transport="capture", host="", address=""),),
            layout=KVLayout(groups=(SPEC,)),
        )  # fmt: skip
        content = random.Random(repr(name)).randbytes(len(blocks) * SPEC.block_bytes())
        self.expected[number] = Expected(name, ticket, content)
        self.intake.expect(ticket)
        pool = HostPool(SPEC, 1, memoryview(bytearray(content)))
        outgoing = Outgoing(ticket, {GROUP: pool}, Rank(0), self._clock)
        self.sendings.append(Sending(name, outgoing, self._frames(outgoing, pool)))

    def send(self, which: int) -> None:
        """One more frame leaves, if its transfer still may send."""
        running = [sending for sending in self.sendings if sending.outcome is None]
        if running:
            next(running[which % len(running)].frames, None)

    def land(self, which: int, *, again: bool = False) -> None:
        """A frame arrives, whichever; `again`: and will once more."""
        if not self.flying:
            return
        index = which % len(self.flying)
        head, payload = self.flying[index] if again else self.flying.pop(index)
        try:
            frame, _ = decode(memoryview(head))
            self.replies.append(self.intake.accept(frame, memoryview(bytearray(payload)), self._link))
        except MalformedFrameError as error:
            self.intake.reject(self._link, error)
            self.cut()

    def lose(self, which: int) -> None:
        if self.flying:
            self.flying.pop(which % len(self.flying))

    def flip(self, which: int, bit: int) -> None:
        """A bit of a payload changes on its way."""
        if self.flying:
            index = which % len(self.flying)
            head, payload = self.flying[index]
            if payload:
                at = bit // 8 % len(payload)
                self.flying[index] = head, payload[:at] + bytes([payload[at] ^ 1 << bit % 8]) + payload[at + 1 :]

    def forge(self, which: int) -> None:
        """Another worker, which knows all numbers, sends other bytes in a frame's place, with the right sum."""
        if (forged := self._other_bytes(which)) is not None:
            peer = Peer(worker=WorkerId("q"), incarnation=self._sender_incarnation, rank=Rank(0), host="here")
            self.replies.append(self.intake.accept(forged[0], memoryview(forged[1]), self.intake.connect(peer)))

    def withdraw(self, which: int) -> None:
        """A payload that lies in the sender's memory arrives when that, and the sum with it, are another's already."""
        if (reused := self._other_bytes(which)) is not None:
            self.flying.pop(which % len(self.flying))
            self.replies.append(self.intake.accept(reused[0], Withdrawn(reused[1]), self._link))

    def answer(self, which: int) -> None:
        """A reply arrives at the sender, which knows transfers by id and attempt."""
        if not self.replies:
            return
        reply = self.replies.pop(which % len(self.replies))
        for sending in self.sendings:
            is_it = sending.outcome is None and sending.name[:2] == (reply.transfer, reply.attempt)
            if is_it and reply.kind is ReplyKind.DONE:
                self._sent(sending, sending.outgoing.done(Rank(0)))
            elif is_it and reply.kind is ReplyKind.FAIL:
                self._sent(sending, sending.outgoing.fail(reply.reason))

    def end(self, number: int, how: str) -> None:
        """The receiver's owner is done with a transfer: its blocks belong to others from now on."""
        expected = self.expected.get(number)
        if expected is None:
            return
        if how == "admit":
            if expected.outcome != "Verified":
                return
            self.intake.admit(TransferId(number))
            self.verified += 1
        elif how == "revoke":
            if not self.intake.revoke(TransferId(number)):
                return
        else:
            self.intake.cancel(TransferId(number))
        del self.expected[number]

    def replace(self, number: int, what: str) -> None:
        """The receiver's owner gives a transfer up; another attempt, or another incarnation, gets the same blocks."""
        expected = self.expected.get(number)
        if expected is None:
            return
        attempt = expected.name[1]
        self.end(number, "cancel")
        if what == "attempt":
            attempt += 1
        elif what == "receiver":
            self.receiver_begins_anew()
        else:
            self.sender_begins_anew()
        self.begin(number, expected.blocks, attempt)

    def cancel_sending(self, which: int) -> None:
        running = [sending for sending in self.sendings if sending.outcome is None]
        if running:
            sending = running[which % len(running)]
            self._sent(sending, sending.outgoing.cancel())

    def cut(self) -> None:
        """The connection breaks; what flies is late and may still come over another one."""
        self.intake.disconnect(self._link, "cut")
        self._link = self._connect()

    def receiver_begins_anew(self) -> None:
        self._receiver_incarnation = Incarnation(self._receiver_incarnation + 1)
        self.intake.set_incarnation(self._receiver_incarnation)

    def sender_begins_anew(self) -> None:
        self._sender_incarnation = Incarnation(self._sender_incarnation + 1)
        for sending in self.sendings:
            if sending.outcome is None:
                self._sent(sending, sending.outgoing.fail("a new incarnation"))

    # ---- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Memory that is not promised does not change, nor verified memory; listed are the open transfers."""
        image, promised = self._image(), {b for e in self.expected.values() if not e.outcome for b in e.blocks}
        for block in range(BLOCKS):
            may_change = block in promised or block in self._promised  # of the latter, one frame may have been bad
            assert may_change or image[block] == self._settled[block], f"block {block} changed after its fence"
        self._settled, self._promised = image, promised
        for expected in self.expected.values():
            if expected.outcome == "Verified":
                self._check_content(expected)
        open_ = {t.transfer: t.phase for t in self.intake.transfers()}
        assert open_.keys() == self.expected.keys()
        for number, phase in open_.items():
            outcome = self.expected[number].outcome
            assert (phase is TransferPhase.VERIFIED) == (outcome == "Verified")
            assert (phase is TransferPhase.FAILED) == (outcome == "Failed")

    def settle(self) -> None:
        """Frames under way arrive; transfers then without an outcome are cancelled; each end has exactly one for each
        transfer."""
        for _ in range(64):
            for index in range(len(self.sendings)):
                self.send(index)
        while self.flying:
            self.land(0)
            self.check()
        while self.replies:
            self.answer(0)
        for number in list(self.expected):
            self.end(number, "admit")
            self.end(number, "cancel")
        for sending in self.sendings:
            if sending.outcome is None:
                self._sent(sending, sending.outgoing.cancel())
            assert sending.outcome is not None, "a transfer without an end at its sender"
            assert sending.outgoing.snapshot().phase in (TransferPhase.ADMITTED, TransferPhase.RELEASED)
        self.check()
        assert self.intake.transfers() == []

    # ---- below -----------------------------------------------------------------------------------------------------

    def _frames(self, outgoing: Outgoing, pool: HostPool) -> Iterator[None]:
        writer, link = (
            FrameWriter(Rank(0), on_broken=self._broken, clock=self._clock),
            Capture(self.flying, FRAME_BYTES),
        )
        blocks = outgoing.ticket.groups[0].blocks
        source = TokenRun(tuple(map(BlockId, range(len(blocks)))), SPEC.block_tokens)
        push = Push(outgoing, GROUP, pool, outgoing.routes[GROUP][0], source, blocks, range(2))
        for job in (Control(outgoing, FrameKind.OPEN), push, Control(outgoing, FrameKind.FINISH)):
            yield from writer.write(link, job)

    def _other_bytes(self, which: int) -> tuple[Frame, bytes] | None:
        """The header of a frame of data that flies, made to fit other bytes."""
        head, payload = self.flying[which % len(self.flying)] if self.flying else (b"", b"")
        if not payload:
            return None
        other = bytes(byte ^ 0xFF for byte in payload)
        frame, _ = decode(memoryview(head))
        fields: dict[str, Any] = {name: getattr(frame, name) for name in Frame.__annotations__}
        return Frame(**fields | {"payload_crc": zlib.crc32(other)}), other

    def _broken(self, outgoing: Outgoing, reason: str) -> None:
        raise AssertionError(reason)

    def _sent(self, sending: Sending, outcome: SenderEvent | None) -> None:
        if outcome is not None:
            assert sending.outcome is None, "two outcomes at the sender"
            sending.outcome = outcome

    def _on_event(self, event: Verified | Failed) -> None:
        expected = self.expected[event.transfer]
        assert not expected.outcome, "two outcomes at the receiver"
        expected.outcome = type(event).__name__
        if isinstance(event, Verified):
            self._check_content(expected)

    def _check_content(self, expected: Expected) -> None:
        image = self._image()
        assert b"".join(image[block] for block in expected.blocks) == expected.content, "wrong bytes were verified"

    def _image(self) -> list[bytes]:
        size = SPEC.block_bytes()
        return [bytes(self._memory[at : at + size]) for at in range(0, len(self._memory), size)]

    def _connect(self) -> InboundLink:
        peer = Peer(worker=WorkerId("p"), incarnation=self._sender_incarnation, rank=Rank(0), host="here")
        return self.intake.connect(peer)
