"""Starts a process that waits for ever, writes (its id, its parent) to the named file, and waits for ever, too.

With `--exec` it becomes the probe, with the arguments that follow.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tandem.core.parent_death_signal import tied


def main(said: Path) -> None:
    with subprocess.Popen(tied([sys.executable, "-m", __spec__.name, "--wait", str(said)])):
        signal.pause()


def wait(said: Path) -> None:
    draft = said.with_suffix(".draft")
    draft.write_text(f"{os.getpid()} {os.getppid()}")
    draft.rename(said)
    signal.pause()


def become() -> None:
    """The probe, in place of this process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.open(os.devnull, os.O_RDONLY)  # closes itself
    command = [sys.executable, "-m", "tests.integration.plugins.start_probe", *sys.argv[2:]]
    os.execve(sys.executable, command, os.environ | {"NEW": "variable"})


if __name__ == "__main__":
    if sys.argv[1] == "--exec":
        become()
    (wait if "--wait" in sys.argv else main)(Path(sys.argv[-1]))
