"""`shm`: payloads through a shared ring, headers and replies over a unix SOCK_SEQPACKET socket, on one host.

sender                                        receiver
  │ ◀────────── nonce ────────────────────────  │
  │ ─────────── answer, nonce, peer ──────────▶ │   both prove that they know the secret (`handshake`)
  │ ◀────────── answer, ring's descriptor ────  │
  │ ═══ payload into the ring ════════════════  │
    │ ─────────── ring position, header ────────▶ │   the message is the wake-up: no polling
    │ ◀── position freed, a word behind the ring   │   read by a sender that is short of memory, before it waits
  │ ◀────────── reply, position freed ────────  │   bundled; wakes a sender that waits
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES, ClusterSecret
from tandem.kvtransfer.frame import MAX_REPLY_BYTES, Frame, FrameReply, encode
from tandem.kvtransfer.transports.acceptor import hang_up
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer, replies_of
from tandem.kvtransfer.transports.payload_ring import SenderRing, largest_payload
from tandem.kvtransfer.transports.secret_handshake import MAX_HELLO_BYTES, HandshakeListener, Introduction
from tandem.kvtransfer.transports.unix_socket import socket_name

POSITION = struct.Struct("<Q")
PURPOSE = b"shm/2"


class ShmLink:
    """The sender's end of one connection."""

    transport = "shm"

    def __init__(self, connection: socket.socket, ring: SenderRing) -> None:
        self._socket, self._ring = connection, ring
        self.max_payload_bytes = largest_payload(ring.size)

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

    def replies(self) -> Iterator[FrameReply]:
        for reply in replies_of(lambda: self._socket.recv(MAX_REPLY_BYTES + 1)):
            self._ring.free(reply.consumed)
            yield reply

    def close(self) -> None:
        self._ring.close()
        hang_up(self._socket)

    def release(self) -> None:
        self._ring.release()
        self._socket.close()


def _introduce(connection: socket.socket, peer: Peer, secret: ClusterSecret) -> int:
    """The dialler's part of the handshake; the ring's descriptor, which comes with the last message. Raises OSError."""
    words = Introduction(PURPOSE, secret, peer)
    connection.send(words.hello(connection.recv(NONCE_BYTES + 1)))
    answer, descriptors, _, _ = socket.recv_fds(connection, ANSWER_BYTES + 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        words.check(answer)
        if len(descriptors) != 1:
            raise LinkClosedError("the receiver passed no ring")
    except LinkClosedError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0]


def introduced(connection: socket.socket, secret: ClusterSecret) -> tuple[Peer, bytes]:
    """The listener's part up to the answer that is sent along with the ring. Raises LinkClosedError or OSError."""
    admission = HandshakeListener(PURPOSE, secret)
    connection.send(admission.challenge)
    peer, _, answer = admission.judge(connection.recv(MAX_HELLO_BYTES + 1))
    return peer, answer
