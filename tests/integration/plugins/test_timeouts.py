"""A test that hangs fails by its name, with the place where it stood, and its fixtures end what they started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
import threading
from pathlib import Path
import pytest

@pytest.fixture
def started():
    yield
    Path({report!r}).touch()

@pytest.mark.timeout(1)
def test_that_hangs(started):
    threading.Event().wait()

def test_behind_it():
    pass
"""


def test_a_test_that_hangs_fails_on_its_runner_and_is_cleaned_up(tmp_path: Path) -> None:
    report = tmp_path / "report"
    (tmp_path / "test_it.py").write_text(SUITE.format(report=str(report)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-c", str(ROOT / "pyproject.toml"), "-p"]
    command += ["tests.conftest", f"--rootdir={tmp_path}", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "Timeout" in run.stdout
    assert "threading.Event().wait()" in run.stdout
    assert report.exists()
