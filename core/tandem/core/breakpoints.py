"""`breakpoint()` in a process without a terminal: pdb over a socket that only this user can open.

Processes of a cluster have `PYTHONBREAKPOINT=tandem.core.breakpoints.stand`; `python -m tandem.core.breakpoints` waits
for one to stop, and attaches. Quitting there lets the process go on: a debugger must not end a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pdb
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.core.logs import event

ATTACH = "python -m tandem.core.breakpoints"
_LOOK_S = 0.1
_log = logging.getLogger(__name__)
_thread = threading.local()
"""Has the `debugger` of this thread, kept between breakpoints; none before the first."""


def stand() -> None:
    """Wait for a debugger to attach, or take the one that is attached, and stop in the caller's next line."""
    caller = sys._getframe(1)
    debugger: _Debugger | None = getattr(_thread, "debugger", None)
    if debugger is None or not debugger.is_attached:
        debugger = _thread.debugger = _Debugger(_accept(f"{caller.f_code.co_filename}:{caller.f_lineno}"))
    debugger.set_trace(caller)


class _Debugger(pdb.Pdb):
    """Leaving it, in any way, continues without breakpoints."""

    def __init__(self, connection: socket.socket) -> None:
        # Two files: one for both ways drops lines that were read ahead when it writes.
        typed = connection.makefile("r", encoding="utf-8", errors="replace")
        shown = connection.makefile("w", encoding="utf-8", errors="replace")
        super().__init__(stdin=typed, stdout=shown, nosigint=True, readrc=False)
        self._connection = connection

    @property
    def is_attached(self) -> bool:
        """True while the other end is connected; it may have sent all its input already, some of it still unread."""
        poll = select.poll()
        poll.register(self._connection, 0)
        return not poll.poll(0)

    def do_quit(self, arg: str) -> bool:
        """Detach: the process continues."""
        self.clear_all_breaks()
        self.set_continue()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        return True

    do_q = do_exit = do_EOF = do_quit  # noqa: N815 - pdb's names

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """A debugger that is gone in the middle of an answer has left, too."""
        try:
            super().interaction(frame, traceback)
        except OSError:
            self.do_quit("")


def _accept(where: str) -> socket.socket:
    """Wait for the next debugger that attaches."""
    path = _folder() / f"{os.getpid()}-{threading.get_native_id()}"
    with socket.socket(socket.AF_UNIX) as listening:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        try:
            listening.listen(1)
            event(_log, "stands at a breakpoint", logging.WARNING, where=where, attach=f"{ATTACH} {os.getpid()}")
            connection, _ = listening.accept()
        finally:
            path.unlink(missing_ok=True)
    return connection


def _folder() -> Path:
    """Folder of the sockets of processes at a breakpoint. Raises PermissionError if another user made it."""
    folder = Path(tempfile.gettempdir()) / f"tandem-breakpoints-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to others, or not ours")
    return folder


# ---- the other end -------------------------------------------------------------------------------------------------


def main() -> int:
    """Attach to a process at a breakpoint, and pass lines on until it or the terminal ends."""
    parser = argparse.ArgumentParser(prog=ATTACH, description="Attach to a process that stands at a breakpoint.")
    parser.add_argument("pid", type=int, nargs="?", help="process; the first one that stands, if it is left out")
    pid = parser.parse_args().pid
    try:
        connection = next(_standing(pid), None)
        if connection is None:
            _show(b"no process stands at a breakpoint yet: waiting\n")
        while connection is None:
            time.sleep(_LOOK_S)
            connection = next(_standing(pid), None)
        with connection:
            _pass_on(connection)
    except KeyboardInterrupt:
        return 130
    return 0


def _standing(pid: int | None) -> Iterator[socket.socket]:
    """Connections to processes at a breakpoint, longest first; sockets of dead ones are removed."""
    paths = [path for path in _folder().iterdir() if pid is None or path.name.startswith(f"{pid}-")]
    for path in sorted(paths, key=lambda one: one.lstat().st_mtime):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name.partition("-")[0]), 0)
                continue
            path.unlink(missing_ok=True)
        else:
            _show(f"attached to process {path.name.partition('-')[0]}; q lets it go on\n".encode())
            yield connection


def _pass_on(connection: socket.socket) -> None:
    reading = [connection.fileno(), sys.stdin.fileno()]
    while True:
        ready, _, _ = select.select(reading, [], [])
        if connection.fileno() in ready:
            said = connection.recv(65536)
            if not said:
                return
            _show(said)
        elif typed := os.read(sys.stdin.fileno(), 65536):
            connection.sendall(typed)
        else:  # the end of a script: its answers are still to come
            connection.shutdown(socket.SHUT_WR)
            reading.remove(sys.stdin.fileno())


def _show(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
