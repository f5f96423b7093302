"""`tcp`: several raw sockets a link. Frames go over them in turn; replies come back over the first.

    frame: │ prelude: magic, head size, its complement │ header, blocks │ payload │
    reply: │ prelude: size, its complement             │ reply          │

Sockets deliver in order, a link as a whole does not: FINISH, which must not overtake data, goes over all of them and
counts at the receiver when the last has brought it. The size travels twice, so that a flipped bit ends the link
instead of letting the receiver wait for bytes that are never sent.

    link thread: gather into a free buffer ──▶ queue of a socket ──▶ its thread: send, buffer is free again

so that the next gather runs while the kernel copies the last one out. Where no core is free for that (fewer than
CORES_A_SOCKET), the link thread sends itself, out of one buffer that stays in the cache.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_PAYLOAD_BYTES,
    MAX_REPLY_BYTES,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode_reply,
    encode,
    encode_reply,
)
from tandem.kvtransfer.transports.acceptor import hang_up
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer
from tandem.kvtransfer.transports.flow_control import SenderWindow
from tandem.kvtransfer.transports.secret_handshake import Introduction
from tandem.kvtransfer.transports.tcp_socket import dial

PURPOSE = b"tcp"
MAX_SOCKETS = 16
CORES_A_SOCKET = 4
"""A socket keeps a core busy at either end: with two cores one was the fastest, two and three slower."""
MOST_SOCKETS = 4
BUFFERS_A_SOCKET = 3
MAGIC = b"TKVT"
PRELUDE = struct.Struct("<4sII")
LINK_ID_BYTES = 16
JOIN = struct.Struct(f"<{LINK_ID_BYTES}sBB")
"""A socket's addition to its introduction: its link's random id, its number in the link, and how many it has."""
_COMPLEMENT = 0xFFFFFFFF
_REPLY = struct.Struct("<HH")
_RECEIVE_BYTES = 1 << 16
DIRECT_BYTES = 64 << 10
"""Shorter sends leave from the caller's thread while the lane is idle: waking another one would take longer."""

_Parts = Sequence[bytes | memoryview]


class TcpLink:
    """The sender's end. Payloads are gathered into its own buffers, which belong to a socket's thread while it sends.

    What has been committed is sent in order on each socket; a socket that breaks ends the link.
    """

    transport = "tcp"
    max_payload_bytes = MAX_PAYLOAD_BYTES

    def __init__(self, sockets: Sequence[socket.socket], *, sends_itself: bool = False) -> None:
        """`sends_itself`: the committing thread also sends; no thread does it beside the next gather."""
        self._lanes = tuple(
            SocketSender(connection, self._break, is_threaded=not sends_itself) for connection in sockets
        )
        self._next = 0
        self._window = SenderWindow()
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        for _ in range(1 if sends_itself else BUFFERS_A_SOCKET * len(sockets)):
            self._free.put(bytearray(MAX_PAYLOAD_BYTES))
        self._reserved: bytearray | None = None

    @classmethod
    def dial(cls, address: str, peer: Peer, secret: ClusterSecret, sockets: int = 0) -> TcpLink:
        """Connect `sockets` sockets (0: by the cores that there are) and authenticate both ways within DIAL_TIMEOUT_S.

        Raises LinkClosedError.
        """
        deadline_s = time.monotonic() + DIAL_TIMEOUT_S
        link_id = secrets.token_bytes(LINK_ID_BYTES)
        cores = os.cpu_count() or 1
        sockets = sockets or sockets_for(cores)
        connected: list[socket.socket] = []
        try:
            for number in range(sockets):
                words = Introduction(PURPOSE, secret, peer, JOIN.pack(link_id, number, sockets))
                connected.append(dial(address, words, deadline_s))
                connected[-1].settimeout(None)
        except (OSError, ValueError) as error:
            for connection in connected:
                connection.close()
            raise error if isinstance(error, LinkClosedError) else LinkClosedError(str(error)) from error
        return cls(connected, sends_itself=len(connected) == 1 and cores < CORES_A_SOCKET)

    @property
    def stalls(self) -> int:
        return self._window.stalls

    def reserve(self, size: int) -> memoryview:
        self._window.wait_for(size)
        if self._reserved is None:
            self._reserved = self._free.get()  # a lane gives one back, or `close` wakes us
        if self._reserved is None:
            self._free.put(None)
            raise LinkClosedError("the link was closed")
        return memoryview(self._reserved)[:size]

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        head = encode(frame)
        head = PRELUDE.pack(MAGIC, len(head), len(head) ^ _COMPLEMENT) + head
        if payload is not None:
            self._window.send(len(payload))
            buffer, self._reserved = self._reserved, None
            if buffer is None:
                raise ValueError("a payload that was not reserved")
            self._next = (self._next + 1) % len(self._lanes)
            room = memoryview(buffer)[: len(payload)]  # the caller's own view ends with the call
            self._lanes[self._next].send((head, room), lambda: self._free.put(buffer))
        elif frame.kind is FrameKind.FINISH:
            for lane in self._lanes:
                lane.send((head,))
        else:
            self._lanes[0].send((head,))

    def replies(self) -> Iterator[FrameReply]:
        try:
            for data in _messages(self._lanes[0].connection):
                reply = decode_reply(data)
                if reply.kind is ReplyKind.CLOSING:
                    raise LinkClosedError(reply.reason)
                self._window.credit(reply.consumed)
                yield reply
        except (OSError, MalformedFrameError) as error:
            raise error if isinstance(error, LinkClosedError) else LinkClosedError(str(error)) from error
        raise LinkClosedError("the receiver hung up")

    def close(self) -> None:
        self._window.close()
        self._free.put(None)
        for lane in self._lanes:
            lane.close()

    def release(self) -> None:
        for lane in self._lanes:
            lane.release()

    def _break(self) -> None:
        """End the link when a lane cannot send: hang up, so that the replies' reader ends and reports it."""
        for lane in self._lanes:
            hang_up(lane.connection)


class SocketSender:
    """One socket of a link on the sender's side, and the thread that sends over it where there is one.

    Sends in the order of `send`. `on_broken` is called, from either thread, when the socket takes nothing more."""

    def __init__(self, connection: socket.socket, on_broken: Callable[[], None], *, is_threaded: bool = True) -> None:
        """`is_threaded`: long sends leave from a thread of its own; without one `send` returns when all was taken."""
        self.connection = connection
        self._on_broken = on_broken
        self._jobs: queue.SimpleQueue[tuple[_Parts, Callable[[], None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._waiting = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-tcp-send", daemon=True) if is_threaded else None
        if self._thread is not None:
            self._thread.start()

    def send(self, parts: _Parts, on_sent: Callable[[], None] = lambda: None) -> None:
        """Queue bytes; `on_sent` is called once they may be changed again. Raises LinkClosedError. One thread calls."""
        is_short = sum(map(len, parts)) <= DIRECT_BYTES
        with self._lock:
            if self._is_closed:
                raise LinkClosedError("the link was closed")
            is_direct = self._thread is None or (is_short and not self._waiting)
            self._waiting += not is_direct
        if is_direct:
            self._send(parts)
            on_sent()
        else:
            self._jobs.put((parts, on_sent))

    def close(self) -> None:
        """Hang up, from any thread; what was queued is not sent."""
        with self._lock:
            self._is_closed = True
        hang_up(self.connection)
        self._jobs.put(None)

    def release(self) -> None:
        """After `close`: wait for the thread, which a closed socket does not keep, and give the descriptor back."""
        if self._thread is not None:
            self._thread.join()
        self.connection.close()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                parts, on_sent = job
                self._send(parts)
                on_sent()
                with self._lock:
                    self._waiting -= 1
        except LinkClosedError:
            pass  # the reader of the link's replies learns it
        finally:
            self._on_broken()  # whatever ended the thread, nothing leaves here any more

    def _send(self, parts: _Parts) -> None:
        try:
            sent = self.connection.sendmsg(parts)
            for part in parts:
                if sent < len(part):
                    self.connection.sendall(memoryview(part)[sent:])
                sent = max(0, sent - len(part))
        except OSError as error:
            with self._lock:
                self._is_closed = True
            self._on_broken()
            raise LinkClosedError(str(error)) from error


def sockets_for(cores: int) -> int:
    """Number of sockets of a link on a machine of so many cores."""
    return max(1, min(MOST_SOCKETS, cores // CORES_A_SOCKET))


def receive_exactly(connection: socket.socket, room: memoryview) -> bool:
    """Fill `room`; False if the connection ended before its first byte. Raises OSError, also where it is cut short."""
    got = 0
    while got < len(room):
        received = connection.recv_into(room[got:], 0, socket.MSG_WAITALL)
        if received == 0:
            if got:
                raise ConnectionError("the connection ended inside a frame")
            return False
        got += received
    return True


def head_size(prelude: memoryview) -> int:
    """Return the head size in a prelude. Raises MalformedFrameError."""
    magic, size, complement = PRELUDE.unpack(prelude)
    if magic != MAGIC or size ^ _COMPLEMENT != complement:
        raise MalformedFrameError(f"not a frame of protocol tcp: starts with {magic!r}")
    return int(size)


def reply_message(reply: FrameReply) -> bytes:
    """A reply as it goes over the first socket."""
    data = encode_reply(reply)
    return _REPLY.pack(len(data), len(data) ^ 0xFFFF) + data


def _messages(connection: socket.socket) -> Iterator[bytes]:
    """The replies' bytes, one after another, until the connection ends. Raises OSError and MalformedFrameError."""
    pending = b""
    while data := connection.recv(_RECEIVE_BYTES):
        pending += data
        while len(pending) >= _REPLY.size:
            size, complement = _REPLY.unpack_from(pending)
            if size ^ 0xFFFF != complement or size > MAX_REPLY_BYTES:
                raise MalformedFrameError("not a reply of this protocol")
            if len(pending) < _REPLY.size + size:
                break
            yield pending[_REPLY.size : _REPLY.size + size]
            pending = pending[_REPLY.size + size :]
