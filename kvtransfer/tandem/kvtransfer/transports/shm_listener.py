"""The receiver's side of `shm`: one thread takes connections, one a connection copies from its ring into the pool."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from dataclasses import replace
from pathlib import Path

from tandem.core.ids import Rank
from tandem.core.logs import event
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import MAX_HEAD_BYTES, MalformedFrameError, Reply, ReplyKind, decode, encode_reply
from tandem.kvtransfer.hostid import host_id
from tandem.kvtransfer.intake import InboundLink, Intake
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, WINDOW_BYTES
from tandem.kvtransfer.transports.ring import ReceiverRing
from tandem.kvtransfer.transports.shm import POSITION, admit, socket_name

MAX_LINKS = 512
_MAX_PATH_BYTES = 100
_log = logging.getLogger(__name__)


class ShmListener:
    """Listens on `kv-….sock` in `runtime_dir`, or on an abstract name where that path is too long for a socket."""

    def __init__(
        self, intake: Intake, secret: ClusterSecret, rank: Rank, runtime_dir: Path, ring_bytes: int = WINDOW_BYTES
    ) -> None:
        self._intake, self._secret, self._rank, self._ring_bytes = intake, secret, rank, ring_bytes
        name = f"kv-{secrets.token_hex(4)}.sock"
        path = str(runtime_dir.absolute() / name)
        self._address = path if len(path.encode()) <= _MAX_PATH_BYTES else f"@tandem-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._acceptor = threading.Thread(target=self._accept, name="kv-shm-accept", daemon=True)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False

    def start(self) -> None:
        self._socket.bind(socket_name(self._address))
        if not self._address.startswith("@"):
            Path(self._address).chmod(0o600)
        self._socket.listen(128)
        self._acceptor.start()

    def endpoint(self) -> Endpoint:
        return Endpoint(rank=self._rank, transport="shm", host=host_id(), address=self._address)

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        with self._lock:
            self._is_closed = True
            threads = list(self._connections.values())
            for connection in self._connections:
                _hang_up(connection)
        if self._acceptor.is_alive():
            _hang_up(self._socket)
            self._acceptor.join()
        for thread in threads:
            thread.join()
        self._socket.close()
        if not self._address.startswith("@"):
            Path(self._address).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._run, args=(connection,), name="kv-shm-in", daemon=True)
            with self._lock:
                is_welcome = not self._is_closed and len(self._connections) < MAX_LINKS
                if is_welcome:
                    self._connections[connection] = thread
                    thread.start()
            if not is_welcome:
                connection.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(DIAL_TIMEOUT_S)
            peer, answer = admit(connection, self._secret)
            ring = ReceiverRing(self._ring_bytes)
            try:
                self._pass_ring(connection, answer, ring)
                self._serve(connection, self._intake.connect(peer), ring)
            finally:
                ring.close()
        except OSError as error:
            event(_log, "transfer_link_refused", logging.WARNING, transport="shm", error=str(error))
        except Exception:  # noqa: BLE001 - top of a thread: `_serve` has failed the link's transfers, here it is told
            _log.exception("transfer_link_broke")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _pass_ring(self, connection: socket.socket, answer: bytes, ring: ReceiverRing) -> None:
        try:
            socket.send_fds(connection, [answer], [ring.descriptor])
        finally:
            ring.close_descriptor()
        connection.settimeout(None)

    def _serve(self, connection: socket.socket, link: InboundLink, ring: ReceiverRing) -> None:
        """Feed frames to the intake until the connection ends; whatever ends it, the intake is told."""
        reason, freed = "the receiver broke off", 0
        try:
            while data := connection.recv(POSITION.size + MAX_HEAD_BYTES + 1):
                reply, freed = self._handle(data, link, ring, freed)
                connection.send(encode_reply(reply))
            reason = "the sender hung up"
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            self._intake.reject(link, error)
            with contextlib.suppress(OSError):
                connection.send(encode_reply(Reply(kind=ReplyKind.CLOSING, reason=reason)))
        except OSError as error:
            reason = str(error)
        finally:
            self._intake.disconnect(link, reason)

    def _handle(self, data: bytes, link: InboundLink, ring: ReceiverRing, freed: int) -> tuple[Reply, int]:
        if len(data) < POSITION.size:
            raise MalformedFrameError(f"a message of {len(data)} bytes")
        (position,) = POSITION.unpack_from(data)
        frame, rest = decode(memoryview(data)[POSITION.size :])
        if len(rest):
            raise MalformedFrameError(f"{len(rest)} bytes too many")
        with ring.view(position, frame.payload_bytes) as payload:
            reply = self._intake.accept(frame, payload, link)
        freed = position + frame.payload_bytes if frame.payload_bytes else freed
        return replace(reply, consumed=freed), freed


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
