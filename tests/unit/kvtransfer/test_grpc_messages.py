"""Test frames in gRPC messages, and bytes objects that are filled in place."""

import queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import BlockId, TransferId
from tandem.kvtransfer.frame import MAX_FRAME_BLOCKS, Frame, FrameKind, MalformedFrameError, encode
from tandem.kvtransfer.transports.grpc import (
    HEAD_ROOM_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    PRELUDE,
    FramePart,
    pack_messages,
    split_message,
)
from tandem.kvtransfer.transports.writable_bytes import Fillable
from tests.unit.kvtransfer.conftest import control

CONTROL = (FrameKind.OPEN, FrameKind.FINISH, FrameKind.ABORT)


def make_frame(number: int, kind: FrameKind, payload_bytes: int = 0, blocks: int = 0) -> Frame:
    ids = tuple(map(BlockId, range(blocks)))
    return control(kind=kind, transfer=TransferId(number), blocks=ids, payload_bytes=payload_bytes)


def make_part(frame: Frame) -> FramePart:
    """Make a part as the link does: the payload, filled with the transfer's number, lies in the later message."""
    if frame.kind is not FrameKind.DATA:
        return FramePart(encode(frame), may_wait=frame.kind is FrameKind.OPEN)
    room = Fillable(HEAD_ROOM_BYTES + frame.payload_bytes)
    room.room[HEAD_ROOM_BYTES:] = bytes([frame.transfer]) * frame.payload_bytes
    return FramePart(encode(frame), room)


def pack(*frames: Frame) -> list[bytes]:
    """The messages of frames that all wait already."""
    outbox: queue.SimpleQueue[FramePart | None] = queue.SimpleQueue()
    for frame in frames:
        outbox.put(make_part(frame))
    messages, packing = list[bytes](), pack_messages(outbox)
    while sum(len(split_message(message)) for message in messages) < len(frames):
        messages.append(next(packing))
    return messages


def test_a_small_transfer_is_one_message() -> None:
    frames = [
        make_frame(1, FrameKind.OPEN),
        make_frame(1, FrameKind.DATA, 1 << 20, 16),
        make_frame(1, FrameKind.FINISH),
    ]
    (message,) = pack(*frames)
    assert [frame for frame, _ in split_message(message)] == frames
    assert [len(payload) for _, payload in split_message(message)] == [0, 1 << 20, 0]
    assert len(message) == HEAD_ROOM_BYTES + (1 << 20)


frames_strategy = st.lists(
    st.one_of(
        st.builds(make_frame, st.integers(0, 255), st.sampled_from(CONTROL)),
        st.builds(
            make_frame, st.integers(0, 255), st.just(FrameKind.DATA), st.integers(1, 3000),
            st.sampled_from([1, 200, 240, 300, MAX_FRAME_BLOCKS]),
        ),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(frames_strategy)
def test_every_frame_arrives_in_order_with_its_payload(frames: list[Frame]) -> None:
    messages = pack(*frames)
    found = [pair for message in messages for pair in split_message(message)]
    assert [frame for frame, _ in found] == frames
    for frame, payload in found:
        assert payload == bytes([frame.transfer]) * frame.payload_bytes
    for message in messages:
        assert len(message) <= MAX_MESSAGE_BYTES
        assert sum(frame.payload_bytes > 0 for frame, _ in split_message(message)) <= 1


def test_the_largest_frame_is_a_message_that_is_let_in() -> None:
    (message,) = pack(make_frame(1, FrameKind.DATA, MAX_PAYLOAD_BYTES, MAX_FRAME_BLOCKS))
    assert len(message) <= MAX_MESSAGE_BYTES


def test_an_open_leaves_though_nothing_follows() -> None:
    outbox: queue.SimpleQueue[FramePart | None] = queue.SimpleQueue()
    packing = pack_messages(outbox)
    outbox.put(make_part(make_frame(1, FrameKind.OPEN)))
    assert [frame.kind for frame, _ in split_message(next(packing))] == [FrameKind.OPEN]
    outbox.put(make_part(make_frame(1, FrameKind.FINISH)))
    assert [frame.kind for frame, _ in split_message(next(packing))] == [FrameKind.FINISH]
    outbox.put(None)
    assert list(packing) == []


def message_of(heads: bytes, payload: bytes = b"", *, size: int | None = None, start: int | None = None) -> bytes:
    end = PRELUDE.size + len(heads)
    return PRELUDE.pack(len(heads) if size is None else size, end if start is None else start) + heads + payload


OPEN, DATA = encode(make_frame(1, FrameKind.OPEN)), encode(make_frame(1, FrameKind.DATA, 10, 1))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "a message of 0 bytes"),
        (message_of(b""), "expected at least"),
        (message_of(OPEN + OPEN[:20]), "expected at least"),
        (message_of(OPEN + DATA, bytes(9)), "bytes, expected"),
        (message_of(OPEN + DATA, bytes(11)), "bytes, expected"),
        (message_of(OPEN, bytes(1)), "bytes, expected"),
        (message_of(DATA + DATA, bytes(10)), "bytes, expected"),
        (message_of(OPEN, size=len(OPEN) + 1), "not a frame of protocol grpc"),
        (message_of(OPEN, start=1), "not a frame of protocol grpc"),
        (message_of(OPEN, start=10_000), "not a frame of protocol grpc"),
        (message_of(OPEN * 231), "bytes of heads"),
        (message_of(OPEN + bytes([OPEN[0] ^ 1]) + OPEN[1:]), "not a frame of protocol"),
    ],
)
def test_a_message_that_is_wrong_in_any_part_gives_no_frame(message: bytes, words: str) -> None:
    with pytest.raises(MalformedFrameError, match=words):
        split_message(message)


def test_a_payload_above_the_bound_is_refused_before_it_is_looked_for() -> None:
    head = encode(make_frame(1, FrameKind.DATA, MAX_PAYLOAD_BYTES + 1, 1))
    with pytest.raises(MalformedFrameError, match="exceed the limit"):
        split_message(message_of(head))


@pytest.mark.parametrize("size", [2, 255, 1 << 20])
def test_what_was_written_is_in_the_object(size: int) -> None:
    made = Fillable(size)
    assert len(made.room) == size
    made.room[:] = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    data = made.take()
    assert type(data) is bytes
    assert data == bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    with pytest.raises(ValueError, match="released"):
        made.room[0] = 1


def test_each_is_an_object_of_its_own() -> None:
    first, second = Fillable(4), Fillable(4)
    first.room[:], second.room[:] = b"aaaa", b"bbbb"
    assert (first.take(), second.take()) == (b"aaaa", b"bbbb")


def test_a_view_outlives_it() -> None:
    made = Fillable(8)
    part = made.room[4:]
    data = made.take()
    del made, data
    part[:] = b"four"
    assert bytes(part) == b"four"


def test_shared_objects_are_never_written() -> None:
    with pytest.raises(ValueError, match="not filled in place"):
        Fillable(1)
