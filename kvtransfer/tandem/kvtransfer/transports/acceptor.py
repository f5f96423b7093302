"""Accepts a listening socket's connections in one thread, and serves each in its own.

A connection that has not proven yet that it knows the cluster secret is a stranger. Strangers have a bound of their
own, past which the oldest is closed: they cannot exhaust the listener for authenticated peers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from tandem.core.logs import event

RETRY_S = 0.1
"""Pause after connections could not be taken, for want of descriptors or memory."""
MAX_STRANGERS = 1024
"""Far more than a burst of legitimate ones: 64 ranks that dial at once with 16 sockets each."""
Serve = Callable[[socket.socket, Callable[[], None]], None]
"""Called with a connection, and with the function to call once its peer is authenticated; that raises OSError if there
are too many links."""
_log = logging.getLogger(__name__)


class Acceptor:
    """`serve` runs on a connection's own thread and owns it until it returns; at most `limit` that are authenticated.

    An exception of `serve` ends its connection alone: an OSError is logged as a refusal, others with their traceback.
    """

    def __init__(self, listening: socket.socket, serve: Serve, *, transport: str, limit: int) -> None:
        """`listening` is owned from now on."""
        self._socket, self._serve, self._transport, self._limit = listening, serve, transport, limit
        self._acceptor = threading.Thread(target=self._accept, name=f"kv-{transport}-accept", daemon=True)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # of those, oldest first
        self._admitted: set[socket.socket] = set()  # of those
        self._closing = threading.Event()

    def start(self) -> None:
        """The socket is bound. Raises OSError."""
        self._socket.listen(128)
        self._acceptor.start()

    def close(self) -> None:
        """End every connection; after return no thread of it runs. Not from a `serve`."""
        with self._lock:
            self._closing.set()
            threads = list(self._connections.values())
            for connection in self._connections:
                hang_up(connection)
        if self._acceptor.is_alive():
            hang_up(self._socket)
            self._acceptor.join()
        for thread in threads:
            thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except ConnectionError:
                continue  # that one was gone before it was taken
            except OSError as error:
                self._pause(error)
                continue
            try:
                is_welcome = self._begin(connection)
            except RuntimeError as error:  # no thread available
                is_welcome = False
                self._pause(error)
            if not is_welcome:
                connection.close()

    def _begin(self, connection: socket.socket) -> bool:
        """Give the connection its thread; False if there are too many. Raises RuntimeError.

        A stranger that has to go is still there until its thread has noticed.
        """
        thread = threading.Thread(target=self._run, args=(connection,), name=f"kv-{self._transport}-in", daemon=True)
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= self._limit + 2 * MAX_STRANGERS:
                return False
            thread.start()
            self._connections[connection] = thread
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                hang_up(oldest)
            return True

    def _admit(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            if len(self._admitted) >= self._limit:
                raise ConnectionRefusedError(f"the limit of {self._limit} links is reached")
            self._admitted.add(connection)

    def _pause(self, error: Exception) -> None:
        """Wait: others may free what is missing, and a listener that gave up could never be reached again."""
        if not self._closing.is_set():
            event(_log, "transfer_accept_failed", logging.WARNING, transport=self._transport, error=str(error))
            self._closing.wait(RETRY_S)

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection, lambda: self._admit(connection))
        except OSError as error:
            event(_log, "transfer_link_refused", logging.WARNING, transport=self._transport, error=str(error))
        except Exception:  # noqa: BLE001 - top of a thread: `serve` has failed the link's transfers, this logs it
            _log.exception("transfer_link_broke")
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._strangers.pop(connection, None)
                self._admitted.discard(connection)
            connection.close()


def hang_up(connection: socket.socket) -> None:
    """Wake every thread that waits on `connection`, here and at its other end. Harmless when repeated."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
