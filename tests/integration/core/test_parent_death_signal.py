"""Children that are tied to their parent: real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.parent_death_signal import tied

CHILD = """
import pathlib, signal, sys
def end(number, frame):
    pathlib.Path(sys.argv[1]).write_text(str(number))
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True:
    signal.pause()
"""
PARENT = """
import signal, subprocess, sys
from tandem.core.parent_death_signal import tied
number = signal.Signals(int(sys.argv[1]))
subprocess.run(tied([sys.executable, "-c", sys.argv[2], sys.argv[3]], number))
"""


@pytest.mark.parametrize(("number", "words"), [(signal.SIGTERM, "15"), (signal.SIGKILL, None)])
def test_a_child_gets_its_signal_when_its_parent_is_killed(
    tmp_path: Path, number: signal.Signals, words: str | None
) -> None:
    said = tmp_path / "said"
    arguments = [sys.executable, "-c", PARENT, str(int(number)), CHILD, str(said)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        assert parent.stdout.read() == "", "it is closed once the child has ended"
    assert (said.read_text() if said.exists() else None) == words


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    *before, parent = tied([])
    assert parent == str(os.getpid())
    other = "1" if os.getpid() != 1 else "2"
    done = subprocess.run([*before, other, "echo", "started"], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
