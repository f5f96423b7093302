"""A copy of the project with files that are changed while its tests run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from proof.mutation.targets import ROOT

LEAST_S, TIMES = 30.0, 6.0
"""A change may make the tests hang: they are ended after so many times their time without one, or so long."""


_BUILT = {"build", "dist", "__pycache__"}


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    HUNG = "hung"
    """Outcome of tests that were ended after some time."""


class House:
    """One copy of the project in a folder that does not exist yet; used by one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=_left_out, symlinks=True)

    def run(self, tests: Sequence[str], timeout_s: float) -> Outcome:
        """Return the tests' outcome for the files as they are now."""
        # That a test fails is enough: the smallest input for which it does would take minutes.
        options = ["-x", "-q", "--full", "-p", "no:cacheprovider", "--hypothesis-profile=first failure"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return Outcome.FAILED if process.wait(timeout_s) else Outcome.PASSED
        except subprocess.TimeoutExpired:
            return Outcome.HUNG
        finally:
            _end(process)

    def timed(self, tests: Sequence[str]) -> float:
        """Seconds that the tests take without a change. SystemExit if they fail."""
        started_s = time.monotonic()
        if self.run(tests, 1800.0) is not Outcome.PASSED:
            raise SystemExit(f"proof.mutation: {' '.join(tests)} fail without any change; mend that first")
        return time.monotonic() - started_s

    def try_out(self, file: str, changed: str, tests: Sequence[str], normal_s: float) -> Outcome:
        """Return the tests' outcome for `changed` in place of the content of `file`; `normal_s` is their time
        without."""
        path = self.folder / file
        original = path.read_text()
        path.write_text(changed)
        try:
            return self.run(tests, max(LEAST_S, TIMES * normal_s))
        finally:
            path.write_text(original)

    def _environment(self) -> dict[str, str]:
        roots = sorted(path.parent for path in self.folder.glob("*/tandem"))
        # No bytecode: two versions of a file within a second look the same to the interpreter.
        more = {"PYTHONPATH": os.pathsep.join(map(str, [*roots, self.folder])), "PYTHONDONTWRITEBYTECODE": "1"}
        return {**os.environ, **more, "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / ".hypothesis")}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes that the tests started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Files that are no part of the project: built ones, environments of any name, and all that begin with a dot."""
    environments = {name for name in names if (Path(folder) / name / "pyvenv.cfg").is_file()}
    return {name for name in names if name.startswith(".") or name in _BUILT} | environments
