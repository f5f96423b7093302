"""Starts the ranks of a tensor-parallel group as processes, and ends those that are left at the end of a module."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120


@dataclass(frozen=True)
class Ranks:
    """The processes of a group, by rank; output is text and includes the tracebacks."""

    processes: list[subprocess.Popen[str]]

    def wait(self) -> None:
        """Wait for all to end well."""
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(outputs), "\n".join(outputs)

    def wait_ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "ready\n", line + process.communicate(timeout=PATIENCE_S)[0]


@pytest.fixture(scope="module")
def start_ranks() -> Iterator[Callable[..., Ranks]]:
    """start_ranks(folder, size, mode, timeout_s=…, ranks=…): `ranks` are those that come, all by default."""
    started: list[subprocess.Popen[str]] = []

    def start(
        folder: Path, size: int, mode: str, *, timeout_s: float = 60, start_timeout_s: float = 60,
        ranks: list[int] | None = None,
    ) -> Ranks:  # fmt: skip
        own = []
        for rank in range(size) if ranks is None else ranks:
            program = [sys.executable, "-m", "tests.integration.engine.tp_program"]
            arguments = [str(folder), str(rank), str(size), mode, str(timeout_s), str(start_timeout_s)]
            own.append(_start([*program, *arguments]))
        started.extend(own)
        return Ranks(own)

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def _start(command: list[str]) -> subprocess.Popen[str]:
    pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environment
    )
