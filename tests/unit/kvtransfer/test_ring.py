"""The shared ring: contents survive wrapping, full rings make the writer wait, nothing lies outside."""

from __future__ import annotations

import mmap
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.frame import MalformedFrameError
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.ring import ReceiverRing, SenderRing

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
        sender.close()
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
    sender.close()
    receiver.close()


def test_an_uncommitted_reservation_is_taken_back() -> None:
    sender, receiver = make_pair()
    sender.reserve(100).release()
    sender.reserve(50).release()
    assert sender.commit(50) == 0
    sender.close()
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
    sender.wake()
    thread.join()
    assert result == ["the link was closed"]
    sender.close()
    receiver.close()


@pytest.mark.parametrize(("position", "size"), [(SIZE - 1, 2), (0, SIZE + 1), (2**64 - 1, 2)])
def test_a_view_never_leaves_the_ring(position: int, size: int) -> None:
    sender, receiver = make_pair()
    with pytest.raises(MalformedFrameError):
        receiver.view(position, size)
    sender.close()
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
