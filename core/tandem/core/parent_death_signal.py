"""Ask Linux to end a process when its parent dies, so that nothing is left behind after `kill -9`.

`tied` puts this file, as a program, before a command: the child arranges its own end and then becomes the command. Code
between fork and exec (`preexec_fn`) is unsafe in a process with threads. The kernel watches the parent's *thread*, so
children are started from one that lives as long as they should. This file imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """`command` for a child that gets signal `number` when this process ends. Its first word is searched on PATH."""
    return [sys.executable, "-ISE", __file__, str(int(number)), str(os.getpid()), *command]


def die_with_parent(expected_parent: int, number: int = signal.SIGKILL) -> None:
    """Arrange for signal `number` at the parent's death; exits at once if the parent is gone already. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != expected_parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606 - the command comes from the caller of `tied`
