"""A test run leaves nothing behind, whether it ends or is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.leftovers import VARIABLE
from tools.running_cluster import is_alive
from tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
import os, subprocess, sys, tempfile, time
from pathlib import Path

def test_it(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", {program!r}], start_new_session=True)
    report = f"{{sleeper.pid}} {{tempfile.mkdtemp()}}"
    Path({report!r} + ".draft").write_text(report)
    os.replace({report!r} + ".draft", {report!r})
    if {waits!r}:
        sleeper.wait()
"""
SLEEPS = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def start(folder: Path, program: str, *, waits: bool) -> tuple[subprocess.Popen[str], Path]:
    """A run of one test that starts `program`, and the file that lists its processes and folders."""
    report = folder / "report"
    (folder / "test_it.py").write_text(SUITE.format(program=program, report=str(report), waits=waits))
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TMPDIR")}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={folder}", str(folder)]
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return run, report


def said(report: Path) -> tuple[int, Path]:
    wait_for(report.exists)
    pid, folder = report.read_text().split()
    return int(pid), Path(folder)


@pytest.mark.parametrize("program", [SLEEPS, DEAF], ids=["sleeps", "deaf to SIGTERM"])
def test_a_killed_run_takes_its_processes_and_files_along(tmp_path: Path, program: str) -> None:
    run, report = start(tmp_path, program, waits=True)
    with run:
        pid, folder = said(report)
        assert is_alive(pid)
        assert folder.is_dir()
        run.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), what="the process is ended")
    wait_for(lambda: not folder.parent.exists(), what="the folder of the run is removed")


def test_a_process_that_outlives_its_test_fails_the_run(tmp_path: Path) -> None:
    run, report = start(tmp_path, SLEEPS, waits=False)
    output, _ = run.communicate(timeout=60)
    pid, folder = said(report)
    assert "1 passed" in output
    assert f"{pid} {sys.executable}" in output
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    wait_for(lambda: not is_alive(pid), what="the process is ended")
    wait_for(lambda: not folder.parent.exists(), what="the folder of the run is removed")
