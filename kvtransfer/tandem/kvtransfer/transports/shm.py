"""`shm`: payloads through a shared ring, headers and replies over a unix SOCK_SEQPACKET socket, on one host.

sender                                        receiver
  │ ◀────────── nonce ────────────────────────  │
  │ ─────────── answer, nonce, peer ──────────▶ │   both prove that they know the cluster secret
  │ ◀────────── answer, ring's descriptor ────  │
  │ ═══ payload into the ring ════════════════  │
  │ ─────────── ring position, header ────────▶ │   the message is the wake-up: nobody polls
  │ ◀────────── reply, position freed ────────  │
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator

from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES, ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_PAYLOAD_BYTES,
    MAX_REPLY_BYTES,
    Frame,
    MalformedFrameError,
    Reply,
    ReplyKind,
    decode_reply,
    encode,
)
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, MAX_PEER_BYTES, LinkClosedError, Peer
from tandem.kvtransfer.transports.ring import SenderRing

POSITION = struct.Struct("<Q")
_DIALLER, _LISTENER = b"shm", b"shm-listener"


class ShmLink:
    """The sender's end of one connection."""

    transport = "shm"

    def __init__(self, connection: socket.socket, ring: SenderRing) -> None:
        self._socket, self._ring = connection, ring
        self.max_payload_bytes = min(MAX_PAYLOAD_BYTES, ring.size // 2)

    @classmethod
    def dial(cls, address: str, peer: Peer, secret: ClusterSecret) -> ShmLink:
        """Connect and authenticate both ways within DIAL_TIMEOUT_S; raises LinkClosedError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(DIAL_TIMEOUT_S)
            connection.connect(socket_name(address))
            ring = SenderRing(_introduce(connection, peer, secret))
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            raise LinkClosedError(str(error)) from error
        return cls(connection, ring)

    @property
    def stalls(self) -> int:
        return self._ring.stalls

    def reserve(self, size: int) -> memoryview:
        return self._ring.reserve(size)

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        position = self._ring.commit(len(payload)) if payload is not None else 0
        try:
            self._socket.send(POSITION.pack(position) + encode(frame))
        except OSError as error:
            raise LinkClosedError(str(error)) from error

    def replies(self) -> Iterator[Reply]:
        while True:
            try:
                data = self._socket.recv(MAX_REPLY_BYTES + 1)
                reply = decode_reply(data) if data else Reply(kind=ReplyKind.CLOSING, reason="the receiver hung up")
            except (OSError, MalformedFrameError) as error:
                raise LinkClosedError(str(error)) from error
            if reply.kind is ReplyKind.CLOSING:
                raise LinkClosedError(reply.reason)
            self._ring.free(reply.consumed)
            yield reply

    def close(self) -> None:
        self._ring.wake()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._ring.close()
        self._socket.close()


def socket_name(address: str) -> str:
    """The kernel's name of an endpoint address: `@name` is abstract, anything else a path."""
    return f"\0{address[1:]}" if address.startswith("@") else address


def _introduce(connection: socket.socket, peer: Peer, secret: ClusterSecret) -> int:
    """The dialler's part of the handshake; the ring's descriptor. Raises OSError."""
    challenge = connection.recv(NONCE_BYTES + 1)
    if len(challenge) != NONCE_BYTES:
        raise LinkClosedError("the receiver sent no challenge")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(secret.answer(challenge, _DIALLER) + nonce + peer.encode())
    answer, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
    if len(descriptors) == 1 and secret.is_answer(nonce, _LISTENER, answer):
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    raise LinkClosedError("the receiver refused, or does not know the cluster secret")


def admit(connection: socket.socket, secret: ClusterSecret) -> tuple[Peer, bytes]:
    """The listener's part up to the answer that is sent along with the ring. Raises LinkClosedError or OSError."""
    challenge = secrets.token_bytes(NONCE_BYTES)
    connection.send(challenge)
    data = connection.recv(ANSWER_BYTES + NONCE_BYTES + MAX_PEER_BYTES + 1)
    answer, nonce = data[:ANSWER_BYTES], data[ANSWER_BYTES : ANSWER_BYTES + NONCE_BYTES]
    if not secret.is_answer(challenge, _DIALLER, answer):
        raise LinkClosedError("the sender does not know the cluster secret")
    try:
        peer = Peer.decode(data[ANSWER_BYTES + NONCE_BYTES :])
    except ValueError as error:
        raise LinkClosedError(f"the sender did not introduce itself: {error}") from error
    return peer, secret.answer(nonce, _LISTENER)
