"""The receiver's side of `shm`: one thread takes connections, one a connection copies from its ring into the pool."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from tandem.core.ids import Rank
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    encode_reply,
)
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S
from tandem.kvtransfer.transports.flow_control import ReceiverCredit
from tandem.kvtransfer.transports.payload_ring import (
    MAX_RING_PAYLOAD_BYTES,
    RING_BYTES,
    ReceiverRing,
    ring_credit,
)
from tandem.kvtransfer.transports.shm import POSITION, introduced
from tandem.kvtransfer.transports.unix_socket import UnixPort

MAX_LINKS = 512
_MAX_POSITION = 1 << 63


class ShmListener:
    """Listens on a unix socket in `runtime_dir`."""

    def __init__(
        self, intake: ReceiverCore, secret: ClusterSecret, rank: Rank, runtime_dir: Path, ring_bytes: int = RING_BYTES
    ) -> None:
        self._intake, self._secret, self._rank, self._ring_bytes = intake, secret, rank, ring_bytes
        self._port = UnixPort(runtime_dir, self._run, transport="shm", limit=MAX_LINKS)

    def start(self) -> None:
        self._port.open()

    def endpoint(self) -> Endpoint:
        return Endpoint(rank=self._rank, transport="shm", host=host_id(), address=self._port.address)

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        self._port.close()

    def _run(self, connection: socket.socket, admit: Callable[[], None]) -> None:
        connection.settimeout(DIAL_TIMEOUT_S)
        peer, answer = introduced(connection, self._secret)
        admit()
        ring = ReceiverRing(self._ring_bytes)
        try:
            self._pass_ring(connection, answer, ring)
            self._serve(connection, self._intake.connect(peer), ring)
        finally:
            ring.close()

    def _pass_ring(self, connection: socket.socket, answer: bytes, ring: ReceiverRing) -> None:
        try:
            socket.send_fds(connection, [answer], [ring.descriptor])
        finally:
            ring.close_descriptor()
        connection.settimeout(None)

    def _serve(self, connection: socket.socket, link: InboundLink, ring: ReceiverRing) -> None:
        """Feed frames to the intake until the connection ends; then end it at the intake, whatever the cause."""
        reason, credit = "the receiver broke off", ring_credit(self._ring_bytes)
        message = memoryview(bytearray(POSITION.size + MAX_HEAD_BYTES + 1))
        try:
            while size := connection.recv_into(message):
                reply = self._handle(message[:size], link, ring, credit)
                if reply is not None:
                    connection.send(encode_reply(reply))
            reason = "the sender hung up"
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            self._intake.reject(link, error)
            with contextlib.suppress(OSError):  # do not wait for a sender that reads nothing
                connection.send(encode_reply(FrameReply(kind=ReplyKind.CLOSING, reason=reason)), socket.MSG_DONTWAIT)
        except OSError as error:
            reason = str(error)
        finally:
            self._intake.disconnect(link, reason)

    def _handle(
        self, data: memoryview, link: InboundLink, ring: ReceiverRing, credit: ReceiverCredit
    ) -> FrameReply | None:
        """Judge one frame; None if its reply, a mere ACK, may wait."""
        if len(data) < POSITION.size:
            raise MalformedFrameError(f"a message of {len(data)} bytes")
        (position,) = POSITION.unpack_from(data)
        frame, rest = decode(data[POSITION.size :], MAX_RING_PAYLOAD_BYTES)
        if len(rest):
            raise MalformedFrameError(f"{len(rest)} trailing bytes")
        if position > _MAX_POSITION:
            raise MalformedFrameError(f"position {position} of a ring")
        with ring.view(position, frame.payload_bytes) as payload:
            reply = self._intake.accept(frame, payload, link)
        if frame.payload_bytes:
            ring.note_freed(position + frame.payload_bytes)
        return credit.settle(frame, reply, position)
