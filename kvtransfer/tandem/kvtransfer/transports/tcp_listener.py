"""The receiver's side of `tcp`: one thread a socket reads into a buffer of its own and hands frames to the intake."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable

from tandem.core.ids import Attempt, Rank, TransferId
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
)
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.acceptor import hang_up
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.control_socket import LAST_WORD_S
from tandem.kvtransfer.transports.flow_control import ReceiverCredit
from tandem.kvtransfer.transports.secret_handshake import HandshakeListener
from tandem.kvtransfer.transports.tcp import (
    JOIN,
    MAX_SOCKETS,
    PRELUDE,
    PURPOSE,
    head_size,
    receive_exactly,
    reply_message,
)
from tandem.kvtransfer.transports.tcp_socket import TcpPort, meet, welcome

MAX_CONNECTIONS = 1024
_MAX_UNFINISHED = 4096
_log = logging.getLogger(__name__)


class TcpListener:
    """Listens on `bind_host` at a port that the system chooses; `advertise_host` goes into the endpoint for senders."""

    def __init__(
        self, intake: ReceiverCore, secret: ClusterSecret, rank: Rank, bind_host: str, advertise_host: str
    ) -> None:
        self._intake, self._secret, self._rank = intake, secret, rank
        self._advertise_host = advertise_host
        self._port = TcpPort(bind_host, self._run)
        self._lock = threading.Lock()
        self._links: dict[bytes, _Inbound] = {}

    def start(self) -> None:
        """Raises OSError if the address cannot be bound."""
        self._port.open("tcp", MAX_CONNECTIONS)

    def endpoint(self) -> Endpoint:
        address = self._port.address(self._advertise_host)
        return Endpoint(rank=self._rank, transport="tcp", host=host_id(), address=address)

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        self._port.close()

    def _run(self, connection: socket.socket, admit: Callable[[], None]) -> None:
        """Serve one socket until it ends. Raises OSError if it is refused."""
        peer, extra, answer = meet(connection, HandshakeListener(PURPOSE, self._secret, JOIN.size))
        admit()
        connection.settimeout(None)
        link_id, number, sockets = JOIN.unpack(extra)
        inbound = self._join(link_id, peer, number, sockets, connection)
        reason = "the receiver broke off"
        try:
            welcome(connection, answer)
            reason = inbound.serve(connection)
        except OSError as error:
            reason = str(error)
        finally:
            with self._lock:
                self._links.pop(link_id, None)
            inbound.leave(reason)

    def _join(self, link_id: bytes, peer: Peer, number: int, sockets: int, connection: socket.socket) -> _Inbound:
        """Return the link that a socket belongs to, made by its first socket. Raises LinkClosedError."""
        if not 0 <= number < sockets <= MAX_SOCKETS:
            raise LinkClosedError(f"socket {number} of {sockets}")
        with self._lock:
            inbound = self._links.get(link_id)
            if inbound is None:
                inbound = self._links[link_id] = _Inbound(self._intake, self._intake.connect(peer), sockets)
            inbound.add(peer, number, sockets, connection)
        return inbound


class _Inbound:
    """The sockets of one link. They end together: the others cannot replace what one of them loses."""

    def __init__(self, intake: ReceiverCore, link: InboundLink, sockets: int) -> None:
        self._intake, self._link, self._size = intake, link, sockets
        self._sockets: dict[int, socket.socket] = {}
        self._lock = threading.Lock()  # guards the fields below, and keeps replies apart on the first socket
        self._reason = ""  # why it has ended
        self._serving = 0
        self._credit = ReceiverCredit()
        self._finishes: Counter[tuple[TransferId, Attempt]] = Counter()

    def add(self, peer: Peer, number: int, sockets: int, connection: socket.socket) -> None:
        """Add a socket. Raises LinkClosedError if it does not fit the others, or comes after one of them has ended."""
        with self._lock:
            self._add(peer, number, sockets, connection)

    def _add(self, peer: Peer, number: int, sockets: int, connection: socket.socket) -> None:
        is_own = peer == self._link.peer and sockets == self._size and number not in self._sockets
        if self._reason or not is_own:
            raise LinkClosedError("a socket that belongs to another link")
        self._sockets[number] = connection
        self._serving += 1

    def serve(self, connection: socket.socket) -> str:
        """Feed a socket's frames to the intake until it ends; return the reason. Raises OSError."""
        head, room = memoryview(bytearray(PRELUDE.size + MAX_HEAD_BYTES)), memoryview(bytearray(MAX_PAYLOAD_BYTES))
        try:
            while receive_exactly(connection, head[: PRELUDE.size]):
                size = head_size(head[: PRELUDE.size])
                if size > MAX_HEAD_BYTES:
                    raise MalformedFrameError(f"a header of {size} bytes exceeds the limit of a frame")
                end = PRELUDE.size + size
                if not receive_exactly(connection, head[PRELUDE.size : end]):
                    raise ConnectionError("the connection ended inside a frame")
                frame, rest = decode(head[PRELUDE.size : end])
                if len(rest):
                    raise MalformedFrameError(f"{len(rest)} trailing bytes")
                payload = room[: frame.payload_bytes]
                if len(payload) and not receive_exactly(connection, payload):
                    raise ConnectionError("the connection ended inside a frame")
                self._accept(frame, payload)
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            self._intake.reject(self._link, error)
            self._say_last(FrameReply(kind=ReplyKind.CLOSING, reason=reason))
            return reason
        return "the sender hung up"

    def leave(self, reason: str) -> None:
        """End the other sockets with this one. Dependent transfers fail with the last socket, not earlier: frames still
        in progress on another would begin or continue transfers of a link that is lost already."""
        with self._lock:
            self._reason = self._reason or reason or "the connection was lost"
            self._serving -= 1
            is_last = self._serving == 0
            for connection in self._sockets.values():
                hang_up(connection)
        if is_last:
            self._intake.disconnect(self._link, self._reason)
            event(_log, "transfer_link_ended", transport="tcp", peer=self._link.peer.worker, reason=self._reason)

    def _accept(self, frame: Frame, payload: memoryview) -> None:
        if self._reason:  # what the other sockets still have in their buffers is lost with the link
            raise LinkClosedError(self._reason)
        if frame.kind is FrameKind.FINISH and not self._is_last_finish(frame):
            return
        reply = self._intake.accept(frame, payload, self._link)
        if frame.kind is FrameKind.OPEN and reply.kind is ReplyKind.ACK:
            return  # no thread waits for it, and it would wake the sender in the middle of its first gather
        with self._lock:
            due = self._credit.settle(frame, reply)
            if due is not None:
                self._reply(due)

    def _is_last_finish(self, frame: Frame) -> bool:
        """True if every socket has brought this FINISH, and with it all the data that was sent before."""
        key = frame.transfer, frame.attempt
        with self._lock:
            self._finishes[key] += 1
            if len(self._finishes) > _MAX_UNFINISHED:
                raise MalformedFrameError("too many transfers finished on some of the sockets only")
            if self._finishes[key] < self._size:
                return False
            del self._finishes[key]
            return True

    def _reply(self, reply: FrameReply) -> None:
        """`_lock` is held. Raises OSError."""
        first = self._sockets.get(0)
        if first is not None:
            first.sendall(reply_message(reply))

    def _say_last(self, reply: FrameReply) -> None:
        """Send if the sender takes it, without waiting for one that reads nothing. Neither here nor with a reply."""
        first = self._sockets.get(0)
        if first is None:
            return
        if self._lock.acquire(timeout=LAST_WORD_S):
            try:
                with contextlib.suppress(OSError):
                    first.send(reply_message(reply), socket.MSG_DONTWAIT)
            finally:
                self._lock.release()
        hang_up(first)  # wakes a thread that holds the lock with a reply for which there is no space
