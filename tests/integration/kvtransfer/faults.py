"""Faults of frames in transit: a link that tampers with them, and a machine in the middle that cuts it."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from tandem.kvtransfer.frame import Frame, FrameReply
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import Link
from tandem.kvtransfer.transports.tcp_socket import join_address, split_address

Sending = tuple[Frame, bytes | None]
Faults = Callable[[Frame, bytes | None], list[Sending]]
"""The frames sent in place of a frame: none, itself, several. Called on the link's thread."""


class FaultyLink:
    """A sender's link that sends what `faults` makes of every frame."""

    def __init__(self, link: Link, faults: Faults) -> None:
        self._link, self._faults = link, faults
        self.transport, self.max_payload_bytes = link.transport, link.max_payload_bytes
        self._buffer = bytearray(self.max_payload_bytes)

    @property
    def stalls(self) -> int:
        return self._link.stalls

    def reserve(self, size: int) -> memoryview:
        return memoryview(self._buffer)[:size]

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        for changed, data in self._faults(frame, None if payload is None else bytes(payload)):
            if data is None:
                self._link.commit(changed, None)
                continue
            with self._link.reserve(len(data)) as room:
                room[:] = data
                self._link.commit(changed, room)

    def replies(self) -> Iterator[FrameReply]:
        return self._link.replies()

    def close(self) -> None:
        self._link.close()

    def release(self) -> None:
        self._link.release()


class Proxy:
    """Forwards connections to an endpoint byte by byte, flips bits on demand, and can cut all of them."""

    def __init__(self, endpoint: Endpoint) -> None:
        where, slash, name = endpoint.address.partition("/")
        self._target = split_address(where)
        self._listening = socket.create_server(("127.0.0.1", 0))
        host, port = self._listening.getsockname()
        self.endpoint = replace(endpoint, address=f"{join_address(host, port)}{slash}{name}")
        self._lock = threading.Lock()
        self._flips: dict[bool, int] = {}
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._sockets: list[socket.socket] = []
        self._threads[0].start()

    def flip(self, *, to_receiver: bool, after_bytes: int) -> None:
        """Flip one bit that passes after so many more bytes in that direction."""
        with self._lock:
            self._flips[to_receiver] = after_bytes

    @property
    def has_flipped(self) -> bool:
        """True if every requested flip was done."""
        with self._lock:
            return not self._flips

    def cut(self) -> None:
        """End every connection at both sides."""
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for connection in (self._listening, *self._sockets):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._forward, args=(client, server), daemon=True)
            with self._lock:
                self._sockets += [client, server]
                self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with contextlib.suppress(OSError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        raise ConnectionError
                    other[source].sendall(self._passed(data, to_receiver=source is client))
        for connection in (client, server):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _passed(self, data: bytes, *, to_receiver: bool) -> bytes:
        with self._lock:
            left = self._flips.get(to_receiver)
            if left is None:
                return data
            if left >= len(data):
                self._flips[to_receiver] = left - len(data)
                return data
            del self._flips[to_receiver]
        return data[:left] + bytes([data[left] ^ 1 << left % 8]) + data[left + 1 :]
