"""Install Tandem into the environment of this Python: `.venv/bin/python tools/install.py EXTRAS`, from a clone.

uv does it where it is on PATH and succeeds, pip else. pip's output goes to `build/install.out`; what it is at is one
line on a terminal, and elsewhere a line for each large package. Needs the standard library alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

LOG = Path("build/install.out")
LARGE_MB = 10.0
_DOWNLOADING = re.compile(r"\s*Downloading (?:\S*/)?([\w.]+)-([^-]+)-\S+ \((?:([\d.]+) MB)?")
_SHOWN_LINES = 20
"""Lines of the log that are shown when pip fails."""


def main() -> int:
    """Run the installer; returns its exit status."""
    wanted = f".[{sys.argv[1]}]"
    if uv := shutil.which("uv"):
        _say("installing with uv")
        # Asks for torch's build for CPUs on a machine without a GPU.
        command = [uv, "pip", "install", "--python", sys.executable, "--torch-backend", "auto", "--editable", wanted]
        if subprocess.run(command, check=False).returncode == 0:
            return 0
        _say("uv did not succeed; pip tries")
    LOG.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-compile"]
    with LOG.open("w") as log, subprocess.Popen([*command, "-e", wanted], stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        show(progress(_kept(pip.stdout, log)), sys.stdout)
    if pip.returncode:
        _say(f"pip failed; all that it said is in {LOG}")
        print("".join(LOG.read_text().splitlines(keepends=True)[-_SHOWN_LINES:]), end="", flush=True)
    return pip.returncode


def progress(lines: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Steps of pip, from its output, and if one takes so long that it is reported where lines stay."""
    found = 0
    for line in lines:
        if line.startswith("Collecting "):
            found += 1
            yield f"{found} package{'s' if found > 1 else ''} found", False
        elif match := _DOWNLOADING.match(line):
            name, version, megabytes = match.groups()
            size = f", {float(megabytes):.0f} MB" if megabytes else ""
            yield f"downloading {name} {version}{size}", float(megabytes or 0) >= LARGE_MB
        elif line.startswith("Building "):
            yield "building", False
        elif line.startswith("Installing collected packages:"):
            yield f"unpacking {line.count(',') + 1} packages", True


def show(steps: Iterable[tuple[str, bool]], out: IO[str]) -> None:
    """One line that changes on a terminal; elsewhere a line for each step that takes long."""
    is_terminal = out.isatty()
    for step, is_long in steps:
        if is_terminal:
            out.write(f"\r\x1b[K==> environment: {step[:80]}")
        elif is_long:
            out.write(f"==> environment: {step}\n")
        out.flush()
    if is_terminal:
        out.write("\r\x1b[K")
        out.flush()


def _kept(lines: Iterable[str], log: IO[str]) -> Iterator[str]:
    for line in lines:
        log.write(line)
        yield line


def _say(text: str) -> None:
    print(f"==> environment: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
