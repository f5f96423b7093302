"""The sender's side of `grpc`: one bidirectional stream a link, a frame with its payload in each message.

    message: │ size of head, where the payload begins │ head: header, blocks │ gap │ payload │

Messages are raw bytes on `/tandem.rpc.v1.KvTransfer/Push` (see `proto/tandem/rpc/v1/transfer.proto`). The gap lets the
sender gather a payload into the message before it knows how long the head is.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from tandem.core.secret import METADATA_KEY, ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    MalformedFrameError,
    Reply,
    ReplyKind,
    decode,
    decode_reply,
    encode,
)
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer
from tandem.kvtransfer.transports.credit import SenderWindow
from tandem.kvtransfer.transports.fillable import Fillable

SERVICE = "tandem.rpc.v1.KvTransfer"
METHOD = "Push"
PEER_KEY = "x-tandem-peer"
HEAD_ROOM_BYTES = 1024
"""Where a payload that is gathered in place begins: behind the prelude and a head of up to 254 blocks."""
PRELUDE = struct.Struct("<II")
MAX_MESSAGE_BYTES = HEAD_ROOM_BYTES + MAX_HEAD_BYTES + MAX_PAYLOAD_BYTES
LOST_AFTER_MS = 3_000
KEEPALIVE_MS = 1_000
COMMON_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", LOST_AFTER_MS - KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_OPTIONS = (
    *COMMON_OPTIONS,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a link
    ("grpc.enable_http_proxy", 0),
)


class GrpcLink:
    """The sender's end of one stream. A payload is gathered straight into the message that gRPC takes."""

    transport = "grpc"
    max_payload_bytes = MAX_PAYLOAD_BYTES

    def __init__(self) -> None:
        self._message: Fillable | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._window = SenderWindow()
        self._channel: Any = None
        self._call: Any = None

    @classmethod
    def dial(cls, address: str, peer: Peer, secret: ClusterSecret) -> GrpcLink:
        """Connect and be greeted within DIAL_TIMEOUT_S; raises LinkClosedError."""
        link = cls()
        metadata = ((METADATA_KEY, secret.rpc_token()), (PEER_KEY, peer.encode().decode("ascii")))
        link._channel = grpc.insecure_channel(address, options=_OPTIONS)
        link._call = link._channel.stream_stream(f"/{SERVICE}/{METHOD}")(
            iter(link._outbox.get, None), metadata=metadata
        )
        patience = threading.Timer(DIAL_TIMEOUT_S, link._call.cancel)
        patience.start()
        try:
            next(link._call)
        except (grpc.RpcError, StopIteration) as error:
            link.close()
            link.release()
            raise LinkClosedError(_reason(error)) from error
        finally:
            patience.cancel()
            patience.join()
        return link

    @property
    def stalls(self) -> int:
        return self._window.stalls

    def reserve(self, size: int) -> memoryview:
        self._window.wait_for(size)
        self._message = Fillable(HEAD_ROOM_BYTES + size)
        return self._message.room[HEAD_ROOM_BYTES:]

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        head = encode(frame)
        end = PRELUDE.size + len(head)
        self._window.send(frame.payload_bytes)
        room, self._message = self._message, None
        if payload is None:
            self._outbox.put(PRELUDE.pack(len(head), end) + head)
        elif end > HEAD_ROOM_BYTES or room is None:
            self._outbox.put(b"".join((PRELUDE.pack(len(head), end), head, payload)))
        else:
            room.room[:end] = PRELUDE.pack(len(head), HEAD_ROOM_BYTES) + head
            self._outbox.put(room.take())

    def replies(self) -> Iterator[Reply]:
        try:
            for data in self._call:
                reply = decode_reply(data)
                if reply.kind is ReplyKind.CLOSING:
                    raise LinkClosedError(reply.reason)
                self._window.credit(reply.consumed)
                yield reply
        except (grpc.RpcError, MalformedFrameError) as error:
            raise LinkClosedError(_reason(error)) from error
        raise LinkClosedError("the receiver ended the stream")

    def close(self) -> None:
        self._window.close()
        self._outbox.put(None)
        self._call.cancel()

    def release(self) -> None:
        self._channel.close()


def split_message(message: bytes) -> tuple[Frame, memoryview]:
    """The frame and its payload, in place. Raises MalformedFrameError."""
    if len(message) < PRELUDE.size:
        raise MalformedFrameError(f"a message of {len(message)} bytes")
    size, start = PRELUDE.unpack_from(message)
    view = memoryview(message)
    if not PRELUDE.size + size <= start <= len(view):
        raise MalformedFrameError(f"no frame of protocol grpc: starts with {message[:4]!r}")
    frame, rest = decode(view[PRELUDE.size : PRELUDE.size + size])
    if len(rest):
        raise MalformedFrameError(f"{len(rest)} bytes too many")
    return frame, view[start:]


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
