"""The codec: round trips, every flipped bit is noticed, bounds hold before anything is allocated."""

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.core.kv_compatibility import Codec
from tandem.kvtransfer.frame import (
    HEADER_BYTES,
    MAX_FRAME_BLOCKS,
    MAX_PAYLOAD_BYTES,
    MAX_REASON_BYTES,
    Checksum,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    decode_reply,
    encode,
    encode_reply,
)
from tests.unit.kvtransfer.conftest import control

u16, u32, u64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    transfer=u64.map(TransferId),
    attempt=u32.map(Attempt),
    source_incarnation=u64.map(Incarnation),
    dest_incarnation=u64.map(Incarnation),
    source_rank=u16.map(Rank),
    source_ranks=u16,
    dest_rank=u16.map(Rank),
    group=u16.map(GroupId),
    layers=st.builds(range, u16, u16),
    heads=st.builds(range, u16, u16),
    blocks=st.lists(u32.map(BlockId), max_size=20).map(tuple),
    payload_bytes=st.integers(0, MAX_PAYLOAD_BYTES),
    payload_crc=u32,
    send_ns=u64,
    codec=st.sampled_from(Codec),
    checksum=st.sampled_from(Checksum),
)


@given(frames, st.binary(max_size=50))
def test_a_frame_survives_the_wire(frame: Frame, rest: bytes) -> None:
    decoded, payload = decode(memoryview(encode(frame) + rest))
    same_bounds = (decoded.layers.start, decoded.layers.stop, decoded.heads.start, decoded.heads.stop)
    assert same_bounds == (frame.layers.start, frame.layers.stop, frame.heads.start, frame.heads.stop)
    assert replace(decoded, layers=frame.layers, heads=frame.heads) == frame
    assert bytes(payload) == rest


@given(frames, st.data())
def test_any_flipped_bit_of_a_header_is_noticed(frame: Frame, data: st.DataObject) -> None:
    head = bytearray(encode(frame))
    bit = data.draw(st.integers(0, 8 * len(head) - 1))
    head[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedFrameError):
        decode(memoryview(bytes(head)))


@given(frames, st.data())
def test_a_truncated_header_is_noticed(frame: Frame, data: st.DataObject) -> None:
    head = encode(frame)
    with pytest.raises(MalformedFrameError):
        decode(memoryview(head[: data.draw(st.integers(0, len(head) - 1))]))


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode(memoryview(data))


@pytest.mark.parametrize(("field", "value"), [("blocks", MAX_FRAME_BLOCKS + 1), ("payload", MAX_PAYLOAD_BYTES + 1)])
def test_an_oversized_count_is_refused_though_its_checksum_holds(field: str, value: int) -> None:
    head = bytearray(encode(control()))
    offset = HEADER_BYTES - (24 if field == "blocks" else 20)
    assert struct.unpack_from("<I", head, offset) == (0,)
    struct.pack_into("<I", head, offset, value)
    struct.pack_into("<I", head, HEADER_BYTES - 4, zlib.crc32(head[:-4]))
    with pytest.raises(MalformedFrameError, match="exceed the limit"):
        decode(memoryview(bytes(head)))


def test_an_unknown_kind_codec_or_version_is_refused() -> None:
    wrong = ((6, 99, "kind"), (7, 3, "codec"), (7, 0x20, "checksum"), (4, 99, "protocol"), (4, 1, "protocol"))
    for offset, value, what in wrong:
        head = bytearray(encode(control()))
        head[offset] = value
        struct.pack_into("<I", head, HEADER_BYTES - 4, zlib.crc32(head[:-4]))
        with pytest.raises(MalformedFrameError, match=what):
            decode(memoryview(bytes(head)))


@given(
    st.builds(FrameReply, kind=st.sampled_from(ReplyKind), transfer=u64.map(TransferId), consumed=u64, reason=st.text())
)
def test_a_reply_survives_the_wire_with_a_bounded_reason(reply: FrameReply) -> None:
    decoded = decode_reply(encode_reply(reply))
    cut = reply.reason.encode()[:MAX_REASON_BYTES].decode(errors="replace")
    assert decoded == replace(reply, reason=cut)


@given(st.binary(max_size=700))
def test_a_garbage_reply_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        decode_reply(data)


def test_no_flipped_bit_of_a_reply_passes() -> None:
    data = encode_reply(
        FrameReply(kind=ReplyKind.FAIL, transfer=TransferId(7), attempt=Attempt(2), consumed=9, reason="no")
    )
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedFrameError):
            decode_reply(bytes(flipped))
