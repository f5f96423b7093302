"""The sender's side of `grpc`: one bidirectional stream a link, a payload at most in each message.

    message: │ size of heads, where the payload begins │ heads: header, blocks; header, blocks; … │ gap │ payload │

Messages are raw bytes on `/tandem.rpc.v1.KvTransfer/Push` (see `proto/tandem/rpc/v1/transfer.proto`). Every message
costs gRPC some ten hand-overs between threads, more than a frame costs us: so frames without payload travel in the
message of their neighbour, and payloads are large. The gap lets the sender gather a payload into the message before it
knows which heads go before it.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc

from tandem.core.call_proof import CallProof
from tandem.core.secret import ClusterSecret
from tandem.core.timeout_scale import patient
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    decode_reply,
    encode,
)
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer
from tandem.kvtransfer.transports.flow_control import SenderWindow
from tandem.kvtransfer.transports.writable_bytes import Fillable

SERVICE = "tandem.rpc.v1.KvTransfer"
METHOD = "Push"
PATH = f"/{SERVICE}/{METHOD}"
PEER_KEY = "x-tandem-peer"
HEAD_ROOM_BYTES = 1024
"""Where a payload that is gathered in place begins: behind the prelude and a head of 235 blocks or several heads."""
PRELUDE = struct.Struct("<II")
MAX_PAYLOAD_BYTES = 2 << 20
MAX_MESSAGE_BYTES = HEAD_ROOM_BYTES + MAX_HEAD_BYTES + MAX_PAYLOAD_BYTES
WINDOW_BYTES = 8 << 20
REPORT_BYTES = WINDOW_BYTES // 2
"""Payload taken before a receiver reports it unasked; with the largest frame it must fit into WINDOW_BYTES."""
OPEN_WAITS_S = 0.002
"""An OPEN waits so long for the first frame of data, to travel with it; no thread waits for it meanwhile."""
LOST_AFTER_MS = int(patient(3_000))
KEEPALIVE_MS = 1_000
COMMON_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", LOST_AFTER_MS - KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", LOST_AFTER_MS - KEEPALIVE_MS),  # else gRPC waits a minute for an answer to a ping
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


class FramePart(NamedTuple):
    """A frame on its way into a message: its head, and its payload or the message that it was gathered into."""

    head: bytes
    payload: Fillable | bytes | None = None
    may_wait: bool = False


class GrpcLink:
    """The sender's end of one stream. A payload is gathered straight into the message that gRPC takes."""

    transport = "grpc"
    max_payload_bytes = MAX_PAYLOAD_BYTES

    def __init__(self) -> None:
        self._message: Fillable | None = None
        self._outbox: queue.SimpleQueue[FramePart | None] = queue.SimpleQueue()
        self._window = SenderWindow(WINDOW_BYTES)
        self._channel: Any = None
        self._call: Any = None

    @classmethod
    def dial(cls, address: str, peer: Peer, secret: ClusterSecret) -> GrpcLink:
        """Connect and be greeted within DIAL_TIMEOUT_S; raises LinkClosedError. Nothing is sent to a listener that does
        not prove that it knows the secret."""
        where, _, listener = address.rpartition("/")
        if not where or not listener:
            raise LinkClosedError(f"{address!r} is not the address of a listener")
        link, proof = cls(), CallProof.of(secret, PATH, listener)
        metadata = (*proof.metadata, (PEER_KEY, peer.encode().decode("ascii")))
        link._channel = grpc.insecure_channel(where, options=_OPTIONS)
        link._call = link._channel.stream_stream(PATH)(pack_messages(link._outbox), metadata=metadata)
        patience = threading.Timer(DIAL_TIMEOUT_S, link._call.cancel)
        patience.start()
        try:
            next(link._call)
            if not proof.is_answered(link._call.initial_metadata()):
                raise LinkClosedError("the receiver did not prove that it knows the cluster secret")
        except (grpc.RpcError, StopIteration, LinkClosedError) as error:
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
        self._window.send(frame.payload_bytes)
        room, self._message = self._message, None
        if payload is None:
            self._outbox.put(FramePart(head, may_wait=frame.kind is FrameKind.OPEN))
        elif room is None:
            raise ValueError("a payload that was not reserved")
        else:
            self._outbox.put(FramePart(head, room))

    def replies(self) -> Iterator[FrameReply]:
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


def pack_messages(outbox: queue.SimpleQueue[FramePart | None]) -> Iterator[bytes]:
    """Messages of the parts in `outbox`, until None; for gRPC's thread, which asks for the next when one has left.

    Parts that wait meanwhile go together, as long as there is one payload among them and the heads fit before it.
    """
    part = outbox.get()
    while part is not None:
        heads, payload, size = [part.head], part.payload, len(part.head)
        while True:
            try:
                part = outbox.get(timeout=OPEN_WAITS_S) if part.may_wait else outbox.get_nowait()
            except queue.Empty:
                yield _message(heads, payload)
                part = outbox.get()
                break
            if part is None:
                break
            is_full = PRELUDE.size + size + len(part.head) > HEAD_ROOM_BYTES
            if is_full or (payload is not None and part.payload is not None):
                yield _message(heads, payload)
                break
            heads.append(part.head)
            size, payload = size + len(part.head), part.payload if payload is None else payload


def _message(heads: list[bytes], payload: Fillable | bytes | None) -> bytes:
    head = b"".join(heads)
    end = PRELUDE.size + len(head)
    if not isinstance(payload, Fillable):
        return b"".join((PRELUDE.pack(len(head), end), head, payload or b""))
    if end > HEAD_ROOM_BYTES:
        return b"".join((PRELUDE.pack(len(head), end), head, payload.room[HEAD_ROOM_BYTES:]))
    payload.room[:end] = PRELUDE.pack(len(head), HEAD_ROOM_BYTES) + head
    return payload.take()


def split_message(message: bytes) -> list[tuple[Frame, memoryview]]:
    """The frames and their payloads, in place. Raises MalformedFrameError if anything in it is wrong."""
    if len(message) < PRELUDE.size:
        raise MalformedFrameError(f"a message of {len(message)} bytes")
    size, start = PRELUDE.unpack_from(message)
    view = memoryview(message)
    if not PRELUDE.size + size <= start <= len(view):
        raise MalformedFrameError(f"not a frame of protocol grpc: starts with {message[:4]!r}")
    if size > HEAD_ROOM_BYTES + MAX_HEAD_BYTES:
        raise MalformedFrameError(f"{size} bytes of heads")
    frames, heads = list[tuple[Frame, memoryview]](), view[PRELUDE.size : PRELUDE.size + size]
    while True:
        frame, heads = decode(heads, MAX_PAYLOAD_BYTES)
        end = start + frame.payload_bytes
        frames.append((frame, view[start:end]))
        start = end
        if not heads:
            break
    if end != len(view):
        raise MalformedFrameError(f"{len(view)} bytes, expected {end}")
    return frames


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
