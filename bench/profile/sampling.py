"""Samples the functions that processes are in, many times a second from outside, by py-spy."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from sysconfig import get_path

RATE_HZ = 200
WAIT_S = 30.0
FORWARD = "tandem/engine/models/"
"""Functions called by those of these files belong to the model's forward, too."""
LIBRARIES = "libraries and the interpreter"
MODEL = "the model's forward"


def place_of(frame: str) -> str:
    """The function of ours that a frame of py-spy, `name (path:line)`, belongs to; LIBRARIES if there is none."""
    name, _, path = frame.partition(" (")
    path = path.partition(".py")[0]
    at = path.rfind("/tandem/")
    if at < 0 or "/site-packages/" in path:
        return LIBRARIES
    return f"{path[at + 1 :].replace('/', '.')}:{name}"


def own_time(raw: str) -> Counter[str]:
    """Samples by the innermost Python function, of py-spy's `raw` format: frames from outside in, and a count.

    Time in native code counts for the calling function.
    """
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack:
            found[MODEL if FORWARD in stack else place_of(stack.rpartition(";")[2])] += int(count)
    return found


@contextmanager
def watched(processes: Mapping[str, int]) -> Iterator[dict[str, Counter[str]]]:
    """Look at processes, by name, for as long as the context lasts; filled at its end: threads that wait do not count.

    Raises SystemExit if one of them cannot be looked at.
    """
    tool = which("py-spy", path=get_path("scripts"))
    if tool is None:
        raise SystemExit("py-spy is not installed. Install the extra `dev`, as `make venv` does.")
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="td-spy-") as folder, ExitStack() as stack:
        outs = {name: Path(folder) / f"{number}.raw" for number, name in enumerate(processes)}
        spies = {name: _spy(tool, pid, outs[name]) for name, pid in processes.items()}
        for spy in spies.values():
            stack.callback(_end, spy)
        for name, spy in spies.items():
            assert spy.stdout is not None
            if not spy.stdout.readline():  # its first words: it has begun
                raise SystemExit(f"py-spy cannot look at {name}: {spy.communicate()[1].partition(chr(10))[0]}")
        yield found
        stack.close()
        found |= {name: own_time(out.read_text()) for name, out in outs.items()}


def _spy(tool: str, pid: int, out: Path) -> subprocess.Popen[str]:
    flags = ["--rate", str(RATE_HZ), "--duration", "unlimited", "--nonblocking"]
    flags += ["--format", "raw", "--function", "--full-filenames", "--output", str(out)]
    return subprocess.Popen(
        [tool, "record", "--pid", str(pid), *flags],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _end(spy: subprocess.Popen[str]) -> None:
    """End it by an interrupt, at which it writes its samples."""
    spy.send_signal(signal.SIGINT)
    try:
        spy.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        spy.kill()
        spy.communicate()
