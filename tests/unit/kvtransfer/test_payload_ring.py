"""The shared ring: contents survive wrapping, full rings make the writer wait, nothing lies outside."""

import mmap
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.frame import MAX_PAYLOAD_BYTES, Frame, FrameKind, FrameReply, MalformedFrameError, ReplyKind
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.flow_control import RingAccount
from tandem.kvtransfer.transports.payload_ring import (
    MAX_RING_BYTES,
    ReceiverRing,
    SenderRing,
    largest_payload,
    ring_credit,
)
from tandem.kvtransfer.transports.sealed_memfd import make_sealed
from tests.unit.kvtransfer.conftest import control

SIZE = mmap.PAGESIZE


def make_pair() -> tuple[SenderRing, ReceiverRing]:
    receiver = ReceiverRing(SIZE)
    sender = SenderRing(os.dup(receiver.descriptor))
    receiver.close_descriptor()
    return sender, receiver


@given(st.lists(st.tuples(st.integers(1, SIZE // 2), st.binary(min_size=1, max_size=4)), max_size=40))
def test_payloads_come_out_as_they_went_in(payloads: list[tuple[int, bytes]]) -> None:
    sender, receiver = make_pair()
    try:
        for size, pattern in payloads:
            content = (pattern * size)[:size]
            with sender.reserve(size) as room:
                room[:] = content
            position = sender.commit(size)
            with receiver.view(position, size) as got:
                assert bytes(got) == content
            sender.free(position + size)
        assert sender.stalls == 0
    finally:
        sender.release()
        receiver.close()


def test_a_full_ring_waits_for_the_receiver_and_never_overwrites() -> None:
    sender, receiver = make_pair()
    half = SIZE // 2
    for value in (1, 2):
        with sender.reserve(half) as room:
            room[:] = bytes([value]) * half
        sender.commit(half)
    done = threading.Event()

    def third() -> None:
        with sender.reserve(half) as room:
            room[:] = bytes([3]) * half
        done.set()

    thread = threading.Thread(target=third)
    thread.start()
    while sender.stalls == 0:
        done.wait(0.001)
    assert bytes(receiver.view(0, half)) == bytes([1]) * half
    assert not done.is_set()
    sender.free(half)
    thread.join()
    assert bytes(receiver.view(0, half)) == bytes([3]) * half
    assert bytes(receiver.view(half, half)) == bytes([2]) * half
    sender.release()
    receiver.close()


def _filled() -> tuple[SenderRing, ReceiverRing]:
    """A pair with a ring that is full of two payloads."""
    sender, receiver = make_pair()
    for _ in range(2):
        sender.reserve(SIZE // 2).release()
        sender.commit(SIZE // 2)
    return sender, receiver


def test_a_sender_short_of_room_sees_what_was_freed_without_a_reply() -> None:
    """Also where the ring begins anew, and a payload skips what is left at its end."""
    sender, receiver = make_pair()
    size, end = SIZE // 2 - 8, 0
    for value in range(1, 20):
        with sender.reserve(size) as room:
            room[:] = bytes([value]) * size
        position = sender.commit(size)
        assert position >= end
        with receiver.view(position, size) as got:
            assert bytes(got) == bytes([value]) * size
        end = position + size
        receiver.note_freed(end)
    assert sender.stalls == 0
    sender.release()
    receiver.close()


@pytest.mark.parametrize("word", [SIZE + 1, 2**63, 2**64 - 1])
def test_more_than_was_filled_cannot_be_freed(word: int) -> None:
    """With any value that the receiver writes: a sender's account never runs ahead of its own head."""
    sender, receiver = _filled()
    receiver.note_freed(word)
    with sender.reserve(SIZE // 2) as room:
        room[:] = bytes(SIZE // 2)
    assert sender.commit(SIZE // 2) == SIZE
    sender.reserve(SIZE // 2).release()
    sender.commit(SIZE // 2)
    receiver.note_freed(0)
    sender.free(SIZE + SIZE // 2)
    sender.reserve(SIZE // 2).release()
    assert sender.commit(SIZE // 2) == 2 * SIZE
    assert sender.stalls == 0
    sender.release()
    receiver.close()


def test_a_word_that_goes_back_takes_no_room_away() -> None:
    sender, receiver = _filled()
    sender.free(SIZE // 2)
    receiver.note_freed(0)
    sender.reserve(SIZE // 2).release()
    assert (sender.commit(SIZE // 2), sender.stalls) == (SIZE, 0)
    sender.release()
    receiver.close()


def test_a_closed_ring_has_no_room_whatever_was_freed() -> None:
    sender, receiver = _filled()
    receiver.note_freed(SIZE)
    sender.close()
    with pytest.raises(LinkClosedError, match="closed"):
        sender.reserve(1)
    sender.release()
    receiver.close()


@pytest.mark.parametrize("size", [0, SIZE - 1, MAX_RING_BYTES + 1, 1 << 40])
def test_a_ring_of_no_sensible_size_is_not_mapped(size: int) -> None:
    """The memory is the sender's as soon as it is mapped, and costs its maker nothing."""
    descriptor = make_sealed("test", size + mmap.PAGESIZE)
    with pytest.raises(LinkClosedError, match="ring of"):
        SenderRing(descriptor)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)  # it was given back


def test_an_uncommitted_reservation_is_taken_back() -> None:
    sender, receiver = make_pair()
    sender.reserve(100).release()
    sender.reserve(50).release()
    assert sender.commit(50) == 0
    sender.release()
    receiver.close()


def test_a_woken_writer_gives_up() -> None:
    sender, receiver = make_pair()
    for _ in range(2):
        sender.reserve(SIZE // 2).release()
        sender.commit(SIZE // 2)
    result: list[str] = []

    def wait() -> None:
        try:
            sender.reserve(1)
        except LinkClosedError as error:
            result.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    sender.close()
    thread.join()
    assert result == ["the link was closed"]
    sender.release()
    receiver.close()


@pytest.mark.parametrize(("position", "size"), [(SIZE - 1, 2), (0, SIZE + 1), (2**64 - 1, 2)])
def test_a_view_never_leaves_the_ring(position: int, size: int) -> None:
    sender, receiver = make_pair()
    with pytest.raises(MalformedFrameError):
        receiver.view(position, size)
    sender.release()
    receiver.close()


def test_a_sender_refuses_memory_that_could_shrink() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(LinkClosedError, match="unsealed"):
        SenderRing(descriptor)


def test_a_receiver_s_ring_cannot_be_shrunk() -> None:
    receiver = ReceiverRing(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(receiver.descriptor, 0)
    receiver.close_descriptor()
    receiver.close()


def _frame(kind: FrameKind, size: int) -> Frame:
    return control(kind=kind, payload_bytes=size)


@given(st.integers(SIZE, 6 << 20), st.lists(st.integers(1, MAX_PAYLOAD_BYTES), max_size=60), st.booleans())
def test_whoever_waits_for_room_is_told_of_it(ring_bytes: int, sizes: list[int], are_large: bool) -> None:
    """Acknowledgements are bundled; a sender with all frames judged still finds room."""
    sender, credit, largest = RingAccount(ring_bytes), ring_credit(ring_bytes), largest_payload(ring_bytes)
    for size in (max(1, largest - size % 64) if are_large else min(size, largest) for size in sizes):
        assert sender.fits(size)
        _, end = sender.take(size)
        reply = credit.settle(_frame(FrameKind.DATA, size), FrameReply(kind=ReplyKind.ACK), end - size)
        if reply is not None:
            sender.free(reply.consumed)


def test_only_acknowledgements_of_data_and_of_an_opening_wait() -> None:
    credit = ring_credit(16 << 20)
    data, probe, finish = (_frame(kind, 1 << 20) for kind in (FrameKind.DATA, FrameKind.PROBE, FrameKind.FINISH))
    opening = _frame(FrameKind.OPEN, 0)
    ack, fail = FrameReply(kind=ReplyKind.ACK), FrameReply(kind=ReplyKind.FAIL)
    assert credit.settle(data, ack, 0) is credit.settle(opening, ack, 0) is None
    refused = credit.settle(opening, fail, 0)
    assert refused is not None
    assert refused.consumed == 1 << 20
    told = [credit.settle(frame, reply, 1 << 20) for frame, reply in ((data, fail), (probe, ack), (finish, ack))]
    assert [reply and reply.consumed for reply in told] == [2 << 20] * 3
