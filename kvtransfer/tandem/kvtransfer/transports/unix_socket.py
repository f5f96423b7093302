"""A listening unix socket that this user alone can reach, and its name in an endpoint."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from tandem.kvtransfer.transports.acceptor import Acceptor, Serve

_MAX_PATH_BYTES = 100
_CREDENTIALS = struct.Struct("iii")


class UnixPort:
    """SOCK_SEQPACKET at `kv-….sock` in `runtime_dir`, or at an abstract name where that path is too long for one. Each
    connection gets a thread that calls `serve` (see Acceptor); `limit` of them at most."""

    def __init__(self, runtime_dir: Path, serve: Serve, *, transport: str, limit: int) -> None:
        path = str(runtime_dir.absolute() / f"kv-{secrets.token_hex(4)}.sock")
        self.address = path if len(path.encode()) <= _MAX_PATH_BYTES else f"@tandem-{secrets.token_hex(8)}"
        self._serve = serve
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._acceptor = Acceptor(self._socket, self._check_and_serve, transport=transport, limit=limit)

    def open(self) -> None:
        """Raises OSError."""
        self._socket.bind(socket_name(self.address))
        if not self.address.startswith("@"):
            Path(self.address).chmod(0o600)
        self._acceptor.start()

    def close(self) -> None:
        """End every connection and take the name back; after return no thread of it runs."""
        self._acceptor.close()
        if not self.address.startswith("@"):
            Path(self.address).unlink(missing_ok=True)

    def _check_and_serve(self, connection: socket.socket, admit: Callable[[], None]) -> None:
        """Raises PermissionError unless the other end was opened by this process's user, or by root. A path's mode and
        folder decide which users may open it; an abstract name has neither."""
        if self.address.startswith("@"):
            user = _user_of(connection)
            if user not in (0, os.geteuid()):
                raise PermissionError(f"user {user} may not connect here")
        self._serve(connection, admit)


def socket_name(address: str) -> str:
    """The kernel's name of an endpoint address: `@name` is abstract, anything else a path."""
    return f"\0{address[1:]}" if address.startswith("@") else address


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
