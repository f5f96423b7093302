"""A listening unix socket that this user alone can reach, its name in an endpoint, and the replies over one."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from tandem.kvtransfer.frame import MAX_REPLY_BYTES, MalformedFrameError, Reply, ReplyKind, decode_reply
from tandem.kvtransfer.transports.base import LinkClosedError

_MAX_PATH_BYTES = 100
_CREDENTIALS = struct.Struct("iii")


class UnixSocket:
    """SOCK_SEQPACKET at `kv-….sock` in `runtime_dir`, or at an abstract name where that path is too long for one: that
    has no mode, so whoever takes connections also asks `check_user`."""

    def __init__(self, runtime_dir: Path) -> None:
        path = str(runtime_dir.absolute() / f"kv-{secrets.token_hex(4)}.sock")
        self.address = path if len(path.encode()) <= _MAX_PATH_BYTES else f"@tandem-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def bind(self) -> None:
        """Raises OSError."""
        self.socket.bind(socket_name(self.address))
        if not self.address.startswith("@"):
            Path(self.address).chmod(0o600)

    def remove(self) -> None:
        """Take the name back; the socket is its user's to close."""
        if not self.address.startswith("@"):
            Path(self.address).unlink(missing_ok=True)


def check_user(listening: UnixSocket, connection: socket.socket) -> None:
    """Raises PermissionError unless the other end was opened by this process's user, or by root. Who may open a path is
    the business of its mode and folder."""
    if not listening.address.startswith("@"):
        return
    user = _user_of(connection)
    if user not in (0, os.geteuid()):
        raise PermissionError(f"user {user} may not connect here")


def socket_name(address: str) -> str:
    """The kernel's name of an endpoint address: `@name` is abstract, anything else a path."""
    return f"\0{address[1:]}" if address.startswith("@") else address


def replies_of(connection: socket.socket) -> Iterator[Reply]:
    """The receiver's replies, a message each; raises LinkClosedError when the connection ends, with the reason."""
    while True:
        try:
            data = connection.recv(MAX_REPLY_BYTES + 1)
            reply = decode_reply(data) if data else Reply(kind=ReplyKind.CLOSING, reason="the receiver hung up")
        except (OSError, MalformedFrameError) as error:
            raise LinkClosedError(str(error)) from error
        if reply.kind is ReplyKind.CLOSING:
            raise LinkClosedError(reply.reason)
        yield reply


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])
