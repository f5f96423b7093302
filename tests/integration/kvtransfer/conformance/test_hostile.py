"""Bytes that no honest sender sends: each transport drops or refuses them, and only that connection suffers."""

import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from tandem.core.errors import TransferError
from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES
from tandem.kvtransfer.events import Failed, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.frame import (
    HEADER_BYTES,
    MAX_FRAME_BLOCKS,
    Frame,
    FrameKind,
    FrameReply,
    ReplyKind,
    encode,
)
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.grpc import MAX_MESSAGE_BYTES
from tandem.kvtransfer.transports.payload_ring import ReceiverRing
from tests.integration.kvtransfer.raw import make_frame

G0 = GroupId(0)


def begin(rig: Any, blocks: Any = (0, 1)) -> tuple[Any, Any, Any, Any]:
    """(target, receiver, ticket, link)."""
    target = rig.side()
    receiver = rig.receiver(target)
    ticket = rig.ticket(receiver.endpoints(), {0: blocks})
    receiver.expect(ticket)
    return target, receiver, ticket, rig.dial(receiver.endpoints()[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attempt": Attempt(7)}, "stale_attempt"),
        ({"source_incarnation": Incarnation(5)}, "wrong_incarnation"),
        ({"dest_incarnation": Incarnation(5)}, "wrong_incarnation"),
        ({"transfer": TransferId(555)}, "unknown_transfer"),
    ],
)
def test_frames_of_others_are_dropped_and_the_link_goes_on(rig: Any, changes: dict[str, Any], reason: str) -> None:
    target, receiver, ticket, link = begin(rig)
    before = receiver.counters()[f"dropped_{reason}"]
    for block in (0, 1):
        link.send(*make_frame(rig, ticket, block, **changes))
    assert receiver_said(link) == [(ReplyKind.FAIL, reason)] * 2
    assert not any(target.memory[G0])
    assert receiver.counters()[f"dropped_{reason}"] - before >= 2
    for block in (0, 1):
        link.send(*make_frame(rig, ticket, block))
    assert isinstance(target.event(), Verified)


def receiver_said(link: Any) -> list[tuple[ReplyKind, str]]:
    return [(reply.kind, reply.reason) for reply in link.told()]


def test_duplicates_are_counted_apart(rig: Any) -> None:
    target, receiver, ticket, link = begin(rig)
    for block in (0, 0, 1, 1, 0):
        link.send(*make_frame(rig, ticket, block))
    assert link.told() == []
    assert target.event().bytes == 2 * rig.DENSE.block_bytes()
    counts = receiver.counters()
    assert (counts["dropped_duplicate"], counts["frames"], counts["blocks"]) == (3, 2, 2)
    assert (target.block(0, 0)[:1], target.block(0, 1)[:1]) == (b"\1", b"\2")
    assert target.events.empty()


def test_a_flipped_payload_bit_fails_the_transfer(rig: Any) -> None:
    target, receiver, ticket, link = begin(rig)
    frame, payload = make_frame(rig, ticket)
    flipped = bytearray(payload)
    flipped[1000] ^= 16
    link.send(frame, bytes(flipped))
    (reply,) = link.told()
    assert reply.kind is ReplyKind.FAIL
    assert target.event() == Failed(transfer=ticket.transfer, reason=reply.reason)
    image = target.image()
    for block in (0, 1):
        link.send(*make_frame(rig, ticket, block))
    assert [reply.kind for reply in link.told()] == [ReplyKind.FAIL] * 2
    assert target.image() == image
    assert not any(image[G0][rig.DENSE.block_bytes() :])  # what was wrong lies in a reserved block, never to be read
    with pytest.raises(TransferError, match="not verified"):
        receiver.admit(ticket.transfer)


def oversized(field: str) -> Callable[[bytes], bytes]:
    """A header that claims too much, with a checksum that holds."""

    def change(message: bytes) -> bytes:
        head = bytearray(message[:HEADER_BYTES])
        offset, value = (HEADER_BYTES - 24, MAX_FRAME_BLOCKS + 1) if field == "blocks" else (HEADER_BYTES - 20, 2**31)
        struct.pack_into("<I", head, offset, value)
        struct.pack_into("<I", head, HEADER_BYTES - 4, zlib.crc32(head[:-4]))
        return bytes(head)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (oversized("blocks"), "exceed the limit"),
        (oversized("payload"), "exceed the limit"),
        (lambda m: m[: HEADER_BYTES - 1], "expected at least"),
        (lambda m: m[: HEADER_BYTES + 3], "block ids"),
        (lambda m: bytes([m[0] ^ 1]) + m[1:], "not a frame of protocol"),
        (lambda m: m[:20] + bytes([m[20] ^ 1]) + m[21:], "checksum"),
        (lambda m: b"GET / HTTP/1.1\r\n\r\n" * 10, "not a frame of protocol"),
    ],
)
def test_malformed_bytes_end_only_their_connection(rig: Any, change: Callable[[bytes], bytes], words: str) -> None:
    target, receiver, ticket, bad = begin(rig)
    other = rig.ticket(receiver.endpoints(), {0: (5,)})
    receiver.expect(other)
    good = rig.dial(receiver.endpoints()[0])
    for link, opened in ((good, other), (bad, ticket)):
        link.send(make_frame(rig, opened, kind=FrameKind.OPEN, blocks=(), payload_bytes=0)[0])
        link.told()
    bad.send_bytes(change(encode(make_frame(rig, ticket)[0])))
    with pytest.raises(LinkClosedError, match=words):
        bad.last_words()
    failed = target.event()
    assert failed.transfer == ticket.transfer
    assert "malformed" in failed.reason
    assert receiver.counters()["dropped_malformed"] == 1
    good.send(*make_frame(rig, other, 5))
    assert target.event() == replace(target_verified(other, rig), last_wire_s=ANY, verified_at_s=ANY)
    assert not any(target.block(0, 0))


def target_verified(ticket: Any, rig: Any) -> Verified:
    return Verified(transfer=ticket.transfer, last_wire_s=0, verified_at_s=0, bytes=rig.DENSE.block_bytes())


@pytest.mark.parametrize("place", range(4, HEADER_BYTES + 4, 5))
def test_no_flipped_bit_of_a_header_passes(rig: Any, place: int) -> None:
    target, _receiver, ticket, link = begin(rig)
    link.send(make_frame(rig, ticket, kind=FrameKind.OPEN, blocks=(), payload_bytes=0)[0])
    link.told()
    frame, payload = make_frame(rig, ticket)
    head = bytearray(encode(frame))
    head[place] ^= 1 << place % 8
    link.send_bytes(bytes(head), b"" if rig.transport == "shm" else payload)
    with pytest.raises(LinkClosedError, match="malformed"):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_a_frame_for_blocks_that_were_not_promised_ends_its_connection(rig: Any) -> None:
    target, _receiver, ticket, link = begin(rig)
    link.send(*make_frame(rig, ticket, 9))
    with pytest.raises(LinkClosedError, match="not in the ticket"):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_a_payload_that_is_too_short_for_its_blocks_ends_its_connection(rig: Any) -> None:
    target, _receiver, ticket, link = begin(rig)
    frame, payload = make_frame(rig, ticket)
    link.send(replace(frame, payload_bytes=len(payload) - 8), payload[:-8])
    with pytest.raises(LinkClosedError, match="payload bytes"):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_a_payload_that_is_cut_short_fails_its_transfer(rig: Any) -> None:
    if rig.transport not in ("tcp", "grpc"):
        pytest.skip("no payload crosses this transport's socket")
    target, _receiver, ticket, link = begin(rig)
    frame, payload = make_frame(rig, ticket)
    link.send_bytes(encode(frame), payload[:-8])
    if rig.transport == "tcp":  # a stream: the rest may still come, until it ends
        link.link.close()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_a_message_above_the_limit_never_arrives(rig: Any) -> None:
    target, _receiver, ticket, link = begin(rig)
    link.send(make_frame(rig, ticket, kind=FrameKind.OPEN, blocks=(), payload_bytes=0)[0])
    link.told()
    size = MAX_MESSAGE_BYTES if rig.transport == "grpc" else 100_000
    link.send_bytes(encode(make_frame(rig, ticket)[0]) + bytes(size))
    with pytest.raises(
        LinkClosedError, match=r"too large|trailing bytes|larger than max|exceeds the limit|control message"
    ):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_hanging_up_fails_what_was_under_way(rig: Any) -> None:
    target, _receiver, ticket, link = begin(rig)
    link.send(*make_frame(rig, ticket))
    link.told()
    link.link.close()
    failed = target.event()
    assert isinstance(failed, Failed)
    assert "lost" in failed.reason


def push_all(sender: Any, ticket: Any) -> None:
    blocks = tuple(BlockId(b) for b in range(8))
    sender.push(ticket.transfer, G0, blocks, blocks, range(4))
    sender.finish(ticket.transfer)


@pytest.mark.parametrize("kind", [ReplyKind.DONE, ReplyKind.FAIL])
def test_a_receiver_says_nothing_of_another_s_transfer(
    rig: Any, kind: ReplyKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, other = rig.side(seed=1), rig.side(), rig.side()
    honest, hostile, sender = rig.receiver(target), rig.receiver(other), rig.sender(source)
    ticket, bait = rig.ticket(honest.endpoints()), rig.ticket(hostile.endpoints(), receiver=WorkerId("d1"))
    honest.expect(ticket)

    def accept(frame: Frame, *_: Any) -> FrameReply:
        if frame.kind is FrameKind.FINISH:
            return FrameReply(kind=ReplyKind.FAIL, transfer=bait.transfer, attempt=bait.attempt, reason="my own")
        return FrameReply(kind=kind, transfer=ticket.transfer, attempt=ticket.attempt, reason="not mine")

    monkeypatch.setattr(hostile._intake, "accept", accept)
    sender.open(ticket)
    sender.open(bait)
    push_all(sender, bait)
    assert source.event() == SendFailed(transfer=bait.transfer, reason="the receiver refused: my own")
    assert sender._find(ticket.transfer).outgoing._waiting == {0}
    push_all(sender, ticket)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)


def test_a_stray_client_of_the_shm_socket_gets_nothing(any_rig: Any) -> None:
    rig = any_rig
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    (endpoint,) = receiver.endpoints()
    peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host=endpoint.host)
    for answer in (b"", b"x" * 10, b"x" * 4000, b"x" * (ANSWER_BYTES + NONCE_BYTES) + peer.encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stray:
            stray.connect(endpoint.address)
            assert len(stray.recv(100)) == NONCE_BYTES
            if answer:
                stray.send(answer)
                message, descriptors, _, _ = socket.recv_fds(stray, 100, 1)
                assert (message, descriptors) == (b"", [])
    ticket = rig.ticket(receiver.endpoints())
    receiver.expect(ticket)
    sender.open(ticket)
    blocks = tuple(BlockId(b) for b in range(8))
    sender.push(ticket.transfer, G0, blocks, blocks, range(4))
    sender.finish(ticket.transfer)
    assert isinstance(source.event(), SendCompleted)


def test_a_receiver_that_does_not_know_the_secret_gets_nothing(any_rig: Any) -> None:
    rig = any_rig
    source, target = rig.side(seed=1), rig.side()
    endpoint = rig.receiver(target).endpoints()[0]
    impostor_path = rig.runtime_dir / "impostor.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(str(impostor_path))
        impostor.listen()
        sender = rig.sender(source)
        sender.open(rig.ticket([replace(endpoint, address=str(impostor_path))]))
        connection, _ = impostor.accept()
        with connection:
            connection.send(bytes(NONCE_BYTES))
            hello = connection.recv(5000)
            ring = ReceiverRing(1 << 20)  # all is as it should be but the answer: it reflects the dialler's own
            socket.send_fds(connection, [hello[:ANSWER_BYTES]], [ring.descriptor])
            ring.close_descriptor()
            ring.close()
        event = source.event()
        assert isinstance(event, SendFailed)
        assert "does not know the cluster secret" in event.reason
    assert source.pools[G0].bytes_read == 0
