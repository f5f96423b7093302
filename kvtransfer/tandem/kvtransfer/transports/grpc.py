"""The sender's side of `grpc`: one bidirectional stream a link, a frame with its payload in each message.

Messages are raw bytes on `/tandem.rpc.v1.KvTransfer/Push` (see `proto/tandem/rpc/v1/transfer.proto`).
"""

from __future__ import annotations

import queue
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
    decode_reply,
    encode,
)
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, WINDOW_BYTES, LinkClosedError, Peer

SERVICE = "tandem.rpc.v1.KvTransfer"
METHOD = "Push"
PEER_KEY = "x-tandem-peer"
MAX_MESSAGE_BYTES = MAX_HEAD_BYTES + MAX_PAYLOAD_BYTES
KEEPALIVE_MS = 10_000
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", 64 << 10),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a link
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class GrpcLink:
    """The sender's end of one stream. `_unacked` messages may be under way; `reserve` waits for the rest."""

    transport = "grpc"
    max_payload_bytes = MAX_PAYLOAD_BYTES

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._buffer = bytearray(MAX_PAYLOAD_BYTES)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._sent = self._acked = 0
        self._is_closed = False
        self.stalls = 0
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

    def reserve(self, size: int) -> memoryview:
        with self._changed:
            if not self._is_closed and self._sent + size - self._acked > self._window_bytes:
                self.stalls += 1
                self._changed.wait_for(lambda: self._is_closed or self._sent + size - self._acked <= self._window_bytes)
            if self._is_closed:
                raise LinkClosedError("the link was closed")
        return memoryview(self._buffer)[:size]

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        message = encode(frame) if payload is None else b"".join((encode(frame), payload))
        with self._changed:
            if self._is_closed:
                raise LinkClosedError("the link was closed")
            self._sent += len(message)
        self._outbox.put(message)

    def replies(self) -> Iterator[Reply]:
        try:
            for data in self._call:
                reply = decode_reply(data)
                if reply.kind is ReplyKind.CLOSING:
                    raise LinkClosedError(reply.reason)
                with self._changed:
                    self._acked = reply.consumed
                    self._changed.notify_all()
                yield reply
        except (grpc.RpcError, MalformedFrameError) as error:
            raise LinkClosedError(_reason(error)) from error
        raise LinkClosedError("the receiver ended the stream")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._outbox.put(None)
        self._call.cancel()

    def release(self) -> None:
        self._channel.close()


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
