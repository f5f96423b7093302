"""The socket beside a communicator: whole messages both ways, and detection of a dead peer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from tandem.kvtransfer.frame import MalformedFrameError

_LENGTH = struct.Struct("<I")
_READ_AHEAD_BYTES = 64 << 10
LAST_WORD_S = 0.1
"""How long a last message waits for one that is being sent."""


class ControlSocket:
    """Length-prefixed messages over a connected stream socket, which it takes over.

    One thread receives; any thread sends; any thread hangs up, which wakes all of them. `release` once they are gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        """The handshake is over, and nothing behind it was read yet."""
        self._socket = connection
        self._reader = connection.makefile("rb", buffering=_READ_AHEAD_BYTES)
        self._sending = threading.Lock()

    @property
    def local_host(self) -> str:
        """The address of this end: on the very interface over which the peer is reached."""
        return str(self._socket.getsockname()[0])

    def set_timeout(self, timeout_s: float | None) -> None:
        """Bound on each following receive and send; None once only the peer's death ends a wait."""
        self._socket.settimeout(timeout_s)

    def send(self, message: bytes) -> None:
        """Raises OSError."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def say_last(self, message: bytes) -> None:
        """Send if the peer takes it, without waiting for one that reads nothing. Nothing can be sent afterwards."""
        if self._sending.acquire(timeout=LAST_WORD_S):
            try:
                with contextlib.suppress(OSError):
                    self._socket.send(_LENGTH.pack(len(message)) + message, socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    def receive(self, limit: int) -> bytes:
        """The next message; empty when the peer hung up. Raises MalformedFrameError above `limit` bytes, OSError."""
        prefix = self._reader.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            return b""
        (length,) = _LENGTH.unpack(prefix)
        if not 0 < length <= limit:
            raise MalformedFrameError(f"a message of {length} bytes is too large for this socket")
        message = self._reader.read(length)
        return message if len(message) == length else b""

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the descriptor back, once no thread receives or sends any more."""
        self._reader.close()
        self._socket.close()
