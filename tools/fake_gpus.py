"""A machine with GPUs, as `nvidia-smi` reports it: a program of that name, which lists GPUs as a test needs them."""

from __future__ import annotations

import os
from pathlib import Path

TOTAL_MIB = 81559
_PROGRAM = """#!/bin/sh
cd "$(dirname "$0")" || exit 1
echo "$1" >>asked
case "$1" in
--query-gpu=index,uuid,memory.used,memory.total) exec cat gpus ;;
--query-compute-apps=gpu_uuid,pid,used_memory) exec cat processes ;;
*) exit 2 ;;
esac
"""


class FakeGpus:
    """Two unused GPUs. For programs that have `folder` first on their PATH, see `path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        self.give_back()

    @property
    def path(self) -> str:
        """A PATH on which the fake programs come before real ones."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def hold(self, gpu: int, used_mib: int, pid: int) -> str:
        """A process takes memory; returns the text that reports this."""
        self._write("processes", f"GPU-{gpu}{gpu}, {pid}, {used_mib}\n")
        self._write("gpus", "".join(_line(one, used_mib if one == gpu else 4) for one in (0, 1)))
        return f"GPU {gpu} has {used_mib} of {TOTAL_MIB} MiB in use (process {pid})"

    def show(self, gpu: int, used_mib: int) -> None:
        """A display takes memory, without a computing process."""
        self._write("processes", "")
        self._write("gpus", "".join(_line(one, used_mib if one == gpu else 4) for one in (0, 1)))

    def give_back(self) -> None:
        """Free all memory."""
        self._write("gpus", "".join(_line(one, 4) for one in (0, 1)))
        self._write("processes", "")

    @property
    def asked(self) -> int:
        """Number of queries so far."""
        log = self.folder / "asked"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def _write(self, name: str, text: str) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.replace(self.folder / name)


def _line(gpu: int, used_mib: int) -> str:
    return f"{gpu}, GPU-{gpu}{gpu}, {used_mib}, {TOTAL_MIB}\n"
