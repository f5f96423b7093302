"""The frame from a sender to a receiver, and the reply. One codec for all transports; no sockets.

    ┌ header, 76 bytes, little-endian ──────────────────────────────┐┌ blocks ──┐┌ payload ─────────────────────┐
    │ magic version kind codec  transfer attempt  incarnations      ││ u32 each ││ [blocks, layers, planes,     │
    │ ranks group layers heads counts payload-crc stamp head-crc    ││          ││  heads, block_tokens, width] │
    └───────────────────────────────────────────────────────────────┘└──────────┘└──────────────────────────────┘

The head crc covers header and blocks, so that a flipped bit cannot send a good payload to a wrong place. Both are
CRC-32 as `zlib.crc32`; the payload's is taken in the pass that copies it (`tandem.kernels.kv_payload`). A link between
devices may name another checksum, in the upper half of the codec's byte. Blocks, heads and layers are the receiver's,
and so are block size and dtype, unless a codec is named. Sizes are bounded before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId
from tandem.core.kv_compatibility import Codec

MAGIC = b"TKVF"
PROTOCOL_VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 20
MAX_FRAME_BLOCKS = 4096
MAX_REASON_BYTES = 512
_HEADER = struct.Struct("<4sHBBQIQQHHHHHHHHIIIQI")
_CRC = struct.Struct("<I")
_REPLY = struct.Struct("<4sHBxQIQH")
_NO_GROUP, _NO_TRANSFER, _NO_ATTEMPT = GroupId(0), TransferId(0), Attempt(0)
HEADER_BYTES = _HEADER.size
MAX_HEAD_BYTES = HEADER_BYTES + 4 * MAX_FRAME_BLOCKS
MAX_REPLY_BYTES = _REPLY.size + MAX_REASON_BYTES + _CRC.size


class MalformedFrameError(ValueError):
    """No frame of this protocol, or one that contradicts its ticket: the connection cannot be trusted."""


class FrameKind(IntEnum):
    """OPEN binds a transfer to the connection, DATA carries blocks, FINISH ends the data, ABORT gives up.

    PROBE carries bytes of no transfer, to measure the link: they are summed, dropped and acknowledged.
    """

    OPEN = 1
    DATA = 2
    FINISH = 3
    ABORT = 4
    PROBE = 5


class Checksum(IntEnum):
    """How a payload's checksum is taken: as `zlib.crc32`, or on the device (`tandem.kernels.payload_checksum`)."""

    CRC32 = 0
    DEVICE = 1


class ReplyKind(IntEnum):
    """One reply to each frame: taken, all of the transfer received and verified, failed; or the connection ends."""

    ACK = 1
    DONE = 2
    FAIL = 3
    CLOSING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame's header. `source_ranks` counts the ranks that feed `dest_rank` in this transfer; `layers` and `heads`
    are local to the destination's pool; `send_ns` is the sender's monotonic clock when it began to read the pool."""

    kind: FrameKind
    transfer: TransferId
    attempt: Attempt
    source_incarnation: Incarnation
    dest_incarnation: Incarnation
    source_rank: Rank
    source_ranks: int
    dest_rank: Rank
    group: GroupId = _NO_GROUP
    layers: range = range(0)
    heads: range = range(0)
    blocks: tuple[BlockId, ...] = ()
    payload_bytes: int = 0
    payload_crc: int = 0
    send_ns: int = 0
    codec: Codec = Codec.NONE
    checksum: Checksum = Checksum.CRC32


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReply:
    """A receiver's answer. `consumed` is the transport's credit: a ring position or a count of bytes."""

    kind: ReplyKind
    transfer: TransferId = _NO_TRANSFER
    attempt: Attempt = _NO_ATTEMPT
    consumed: int = 0
    reason: str = ""


def encode(frame: Frame) -> bytes:
    """Header and blocks of `frame`; the payload follows separately."""
    header = _HEADER.pack(
        MAGIC, PROTOCOL_VERSION, frame.kind, frame.codec | frame.checksum << 4, frame.transfer, frame.attempt,
        frame.source_incarnation, frame.dest_incarnation, frame.source_rank, frame.source_ranks, frame.dest_rank,
        frame.group, frame.layers.start, frame.layers.stop, frame.heads.start, frame.heads.stop,
        len(frame.blocks), frame.payload_bytes, frame.payload_crc, frame.send_ns, 0,
    )  # fmt: skip
    blocks = array("I", frame.blocks).tobytes()
    head = header[: -_CRC.size]
    return head + _CRC.pack(zlib.crc32(blocks, zlib.crc32(head))) + blocks


def decode(data: memoryview, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> tuple[Frame, memoryview]:
    """The frame at the start of `data` and what follows its blocks. Raises MalformedFrameError.

    `max_payload_bytes`: more than the usual only where it bounds no memory that is taken for the payload: that lies in
    the sender's memory or a ring, or came in a message that had a bound of its own.
    """
    if len(data) < HEADER_BYTES:
        raise MalformedFrameError(f"a header of {len(data)} bytes, expected at least {HEADER_BYTES}")
    fields = _HEADER.unpack_from(data)
    magic, version, kind, coded, transfer, attempt, source_inc, dest_inc, source_rank, source_ranks = fields[:10]
    dest_rank, group, layer_start, layer_stop, head_start, head_stop, num_blocks, payload = fields[10:18]
    crc, send_ns, head_crc = fields[18:]
    if magic != MAGIC or version != PROTOCOL_VERSION:
        raise MalformedFrameError(
            f"not a frame of protocol {PROTOCOL_VERSION}: starts with {magic!r}, version {version}"
        )
    if num_blocks > MAX_FRAME_BLOCKS or payload > max_payload_bytes:
        raise MalformedFrameError(f"{num_blocks} blocks and {payload} bytes exceed the limit of a frame")
    end = HEADER_BYTES + 4 * num_blocks
    if len(data) < end:
        raise MalformedFrameError(f"{len(data)} bytes are too few for {num_blocks} block ids")
    covered = zlib.crc32(data[HEADER_BYTES:end], zlib.crc32(data[: HEADER_BYTES - _CRC.size]))
    if covered != head_crc:
        raise MalformedFrameError("the header's checksum does not match")
    if kind not in _KINDS:
        raise MalformedFrameError(f"unknown frame kind {kind}")
    codec, summed = coded & 0xF, coded >> 4
    if codec not in _CODECS or summed not in _CHECKSUMS:
        raise MalformedFrameError(f"unknown codec {codec} or checksum {summed}")
    frame = Frame(
        kind=_KINDS[kind], transfer=transfer, attempt=attempt, source_incarnation=source_inc, dest_incarnation=dest_inc,
        source_rank=source_rank, source_ranks=source_ranks, dest_rank=dest_rank, group=group,
        layers=range(layer_start, layer_stop), heads=range(head_start, head_stop),
        blocks=cast("tuple[BlockId, ...]", tuple(data[HEADER_BYTES:end].cast("I"))),  # BlockId() is a call for each
        payload_bytes=payload, payload_crc=crc,
        send_ns=send_ns, codec=_CODECS[codec], checksum=_CHECKSUMS[summed],
    )  # fmt: skip
    return frame, data[end:]


def encode_reply(reply: FrameReply) -> bytes:
    """The reply in at most MAX_REPLY_BYTES, with a CRC-32 at its end; a longer reason is cut."""
    reason = reply.reason.encode()[:MAX_REASON_BYTES]
    head = _REPLY.pack(MAGIC, PROTOCOL_VERSION, reply.kind, reply.transfer, reply.attempt, reply.consumed, len(reason))
    return head + reason + _CRC.pack(zlib.crc32(reason, zlib.crc32(head)))


def decode_reply(data: bytes) -> FrameReply:
    """Inverse of `encode_reply`; raises MalformedFrameError."""
    end = len(data) - _CRC.size
    if not _REPLY.size <= end <= MAX_REPLY_BYTES - _CRC.size:
        raise MalformedFrameError(f"a reply of {len(data)} bytes")
    magic, version, kind, transfer, attempt, consumed, length = _REPLY.unpack_from(data)
    if magic != MAGIC or version != PROTOCOL_VERSION or kind not in _REPLIES or _REPLY.size + length != end:
        raise MalformedFrameError("not a reply of this protocol")
    if _CRC.pack(zlib.crc32(data[:end])) != data[end:]:
        raise MalformedFrameError("the reply's checksum does not match")
    reason = data[_REPLY.size : end].decode(errors="replace")
    return FrameReply(kind=_REPLIES[kind], transfer=transfer, attempt=attempt, consumed=consumed, reason=reason)


_KINDS = {kind.value: kind for kind in FrameKind}
_CODECS = {codec.value: codec for codec in Codec}
_CHECKSUMS = {kind.value: kind for kind in Checksum}
_REPLIES = {kind.value: kind for kind in ReplyKind}
