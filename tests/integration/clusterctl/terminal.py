"""A command on a terminal of its own, as people run it: what it shows can be waited for, and keys can be typed."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from types import TracebackType

from tools.waiting import wait_for

ROWS, COLUMNS = 40, 160
CTRL_C, CTRL_D = "\x03", "\x04"
_PATIENCE_S = 60.0
_LOG_IN = """
import os, sys
terminal, out = int(sys.argv[1]), sys.argv[2]
os.login_tty(terminal)
if out:
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Terminal:
    """`clusterctl` with these arguments. `out`: a file that takes the standard output in place of the terminal."""

    def __init__(self, *arguments: str, out: Path | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        command = [sys.executable, "-c", _LOG_IN, str(theirs), str(out or "")]
        command += [sys.executable, "-m", "tandem.clusterctl", *arguments]
        kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(command, pass_fds=(theirs,), env={**kept, "TERM": "xterm-256color"})
        os.close(theirs)
        self._shown = b""
        self._reader = threading.Thread(target=self._read, name="terminal")
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    @property
    def shown(self) -> str:
        """All that was written to the terminal so far, what was typed and every control sequence included."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until `text` stands in `shown` behind the place `after`; return the place behind it."""

        def found() -> bool:
            assert text in self.shown[after:] or self.process.poll() is None, f"ended without {text!r}: {self.shown}"
            return text in self.shown[after:]

        wait_for(found, _PATIENCE_S, f"it shows {text!r}")
        return self.shown.index(text, after) + len(text)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode(errors="surrogateescape"))

    def end(self) -> int:
        """Return its exit code, once it has ended and all its output is there."""
        code = self.process.wait(_PATIENCE_S)
        self._reader.join()
        return code

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._ours, 65536)
            except OSError:  # EIO: the other end is closed
                return
            if not some:
                return
            self._shown += some
