"""Bytes that no honest sender sends, put onto a transport's own carrier."""

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tandem.core.ids import BlockId, GroupId, Rank, TransferId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports import grpc as over_grpc
from tandem.kvtransfer.transports import tcp as over_tcp
from tandem.kvtransfer.transports.base import Link, Peer
from tandem.kvtransfer.transports.registry import find
from tests.unit.kvtransfer.conftest import control

MARK = TransferId(999_999_999)


def dial_raw(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
    """Dial a link that delivers frames in the order of their sending."""
    if endpoint.transport == "tcp":
        return over_tcp.TcpLink.dial(endpoint.address, peer, secret, sockets=1)
    return find(endpoint.transport).dial(endpoint, peer, secret)


class Raw:
    """A bare link. `told` holds the receiver's replies, without plain ACKs of data: transports bundle those."""

    def __init__(self, link: Link, transport: str) -> None:
        self.link, self._transport = link, transport
        self._replies: Iterator[FrameReply] = link.replies()

    def send(self, frame: Frame, payload: bytes | None = None) -> None:
        if payload is None:
            self.link.commit(frame, None)
            return
        with self.link.reserve(len(payload)) as room:
            room[:] = payload
            self.link.commit(frame, room)

    def send_bytes(self, head: bytes, payload: bytes = b"") -> None:
        """Send one frame as the transport would carry it, with any bytes in it."""
        link: Any = self.link
        if self._transport == "shm":
            link._socket.send(bytes(8) + head + payload)
        elif self._transport in ("cpu_ipc", "cuda_ipc"):
            link._socket.send(bytes(16) + head + payload)
        elif self._transport == "tcp":
            prelude = over_tcp.PRELUDE.pack(over_tcp.MAGIC, len(head), len(head) ^ 0xFFFFFFFF)
            link._lanes[0].connection.sendall(prelude + head + payload)
        elif self._transport == "grpc":
            link._outbox.put(over_grpc.FramePart(head, payload))
        else:
            link._control.send(head + payload)

    def told(self) -> list[FrameReply]:
        """All replies up to now. Raises LinkClosedError, with the receiver's last reason."""
        self.send(control(transfer=MARK))
        replies = []
        for reply in self._replies:
            if reply.transfer == MARK:
                break
            if reply.kind is not ReplyKind.ACK:
                replies.append(reply)
        return replies

    def last_words(self) -> None:
        """Read until the receiver ends the connection: raises LinkClosedError with its reason."""
        for _ in self._replies:
            pass


def make_frame(rig: Any, ticket: Any, block: int = 0, **changes: Any) -> tuple[Frame, bytes]:
    """A good data frame for one block of group 0, then changed."""
    payload = bytes([block + 1]) * rig.DENSE.block_bytes()
    frame = Frame(
        kind=FrameKind.DATA, transfer=ticket.transfer, attempt=ticket.attempt,
        source_incarnation=ticket.sender_incarnation, dest_incarnation=ticket.receiver_incarnation,
        source_rank=Rank(0), source_ranks=1, dest_rank=Rank(0), group=GroupId(0), layers=range(4), heads=range(4),
        blocks=(BlockId(block),), payload_bytes=len(payload), payload_crc=zlib.crc32(payload), send_ns=1,
    )  # fmt: skip
    return replace(frame, **changes), payload
