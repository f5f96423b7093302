"""One socket of a link on the sender's side, and the thread that sends over it where there is one."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence

from tandem.kvtransfer.transports.acceptor import hang_up
from tandem.kvtransfer.transports.base import LinkClosedError

DIRECT_BYTES = 64 << 10
"""Shorter sends leave from the caller's thread while the lane is idle: waking another one would take longer."""

_Parts = Sequence[bytes | memoryview]


class SocketSender:
    """Sends in the order of `send`. `on_broken` is called, from either thread, when the socket takes nothing more."""

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
