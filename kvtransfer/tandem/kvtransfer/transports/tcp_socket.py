"""TCP sockets as transports use them: addresses, options, a port to be reached at, and the handshake of both ends."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES
from tandem.core.timeout_scale import patient
from tandem.kvtransfer.transports.acceptor import Acceptor
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer
from tandem.kvtransfer.transports.secret_handshake import MAX_HELLO_BYTES, HandshakeListener, Introduction

LOST_AFTER_S = int(patient(2))
"""An idle link is probed after a second without a packet; one second later it is lost. Bytes that were sent and are
not acknowledged, or do not fit at the receiver, for so long end the link too. Both are kept below the LEASE_S of
the control channel, and must stay whole seconds: the system checks an idle link once a second."""
_MOST_PROBES = 127
_MESSAGE = struct.Struct("<H")


def join_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class TcpPort:
    """A port that the system chooses on `bind_host`. Each connection gets a thread that calls `run` with it, and with
    what `run` calls once the other end has proven itself (see Acceptor)."""

    def __init__(self, bind_host: str, run: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        self._bind_host, self._run = bind_host, run
        self._port = 0
        self._acceptor: Acceptor | None = None

    def open(self, transport: str, limit: int) -> None:
        """Take up to `limit` connections. Raises OSError if the address cannot be bound."""
        family, kind, protocol, _, address = socket.getaddrinfo(
            self._bind_host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.bind(address)
            self._port = listening.getsockname()[1]
            self._acceptor = Acceptor(listening, self._run, transport=transport, limit=limit)
            self._acceptor.start()
        except OSError:
            listening.close()
            raise

    def address(self, advertise_host: str) -> str:
        """The address at which senders reach it."""
        return join_address(advertise_host, self._port)

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        if self._acceptor is not None:
            self._acceptor.close()


def dial(address: str, words: Introduction, deadline_s: float) -> socket.socket:
    """Connect to a `TcpPort`; both ends have proven themselves before `deadline_s` (monotonic).

    Raises OSError or ValueError.
    """
    connection = socket.create_connection(split_address(address), _remaining_s(deadline_s))
    try:
        _tune(connection)
        _send(connection, words.hello(_receive(connection, NONCE_BYTES, deadline_s)))
        words.check(_receive(connection, ANSWER_BYTES, deadline_s))
    except (OSError, ValueError):
        connection.close()
        raise
    return connection


def meet(connection: socket.socket, admission: HandshakeListener) -> tuple[Peer, bytes, bytes]:
    """Answer `dial`; return (the peer, its extra bytes, the answer that `welcome` is to send). Raises OSError if it is
    not authenticated within DIAL_TIMEOUT_S."""
    _tune(connection)
    deadline_s = time.monotonic() + DIAL_TIMEOUT_S
    connection.settimeout(DIAL_TIMEOUT_S)
    _send(connection, admission.challenge)
    return admission.judge(_receive(connection, MAX_HELLO_BYTES, deadline_s))


def welcome(connection: socket.socket, answer: bytes) -> None:
    """Send the last message of the handshake. Raises OSError."""
    _send(connection, answer)


def _tune(connection: socket.socket) -> None:
    """No delay for small frames; a peer that stops answering is given up after LOST_AFTER_S, also on an idle link."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, min(LOST_AFTER_S - 1, _MOST_PROBES))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_S * 1000)


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_MESSAGE.pack(len(data)) + data)


def _receive(connection: socket.socket, most_bytes: int, deadline_s: float) -> bytes:
    """One message, all of it before `deadline_s`."""
    (size,) = _MESSAGE.unpack(_receive_exactly(connection, _MESSAGE.size, deadline_s))
    if size > most_bytes:
        raise LinkClosedError(f"a message of {size} bytes in the handshake")
    return _receive_exactly(connection, size, deadline_s)


def _receive_exactly(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(_remaining_s(deadline_s))
        part = connection.recv(size - len(data))
        if not part:
            raise LinkClosedError("the other end hung up: it refused, or does not know the cluster secret")
        data += part
    return data


def _remaining_s(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the handshake took too long")
    return remaining_s
