"""Test the plugins of a test run: drawn cases, memory and timeouts."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.plugins.drawn import FULL
from tests.plugins.memory import GROWTH_MIB, Memory, resident_mib

ROOT = Path(__file__).resolve().parents[3]
SUITE = """
import pytest

@pytest.mark.drawn(3)
@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("a", ["x", "y"])
def test_matrix(a, b): ...

@pytest.mark.drawn(1, of="scenes")
def test_one_scene(): ...

@pytest.mark.drawn(1, of="scenes")
def test_another_scene(): ...

def test_always(): ...
"""


def collected(folder: Path, *arguments: str) -> list[str]:
    """Names of the tests that a run with these arguments would run."""
    (folder / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "tests.conftest", f"--rootdir={folder}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", FULL))}
    done = subprocess.run(
        [*command, *(arguments if any("::" in each for each in arguments) else (*arguments, str(folder)))],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_a_matrix_and_scenes(tmp_path: Path) -> None:
    drawn = collected(tmp_path, "--seed=1")
    matrix = [name for name in drawn if name.startswith("test_matrix")]
    assert len(matrix) == 3
    assert {name[-2] for name in matrix} == {"1", "2", "3"}
    assert {name[-4] for name in matrix} == {"x", "y"}
    assert len(drawn) == 3 + 1 + 1
    assert "test_always" in drawn
    assert collected(tmp_path, "--seed=1") == drawn
    assert any(collected(tmp_path, f"--seed={seed}") != drawn for seed in (2, 3))


def test_full_and_named_and_repeated_cases(tmp_path: Path) -> None:
    assert len(collected(tmp_path, "--full")) == 6 + 2 + 1
    named = [str(tmp_path / "test_it.py") + "::test_matrix[x-2]"]
    assert collected(tmp_path, *named) == ["test_matrix[x-2]"]
    assert len(collected(tmp_path, "--repeat=2")) == 2 * (3 + 1 + 1)


HANGING_SUITE = """
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
    (tmp_path / "test_it.py").write_text(HANGING_SUITE.format(report=str(report)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-c", str(ROOT / "pyproject.toml"), "-p"]
    command += ["tests.conftest", f"--rootdir={tmp_path}", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "Timeout" in run.stdout
    assert "threading.Event().wait()" in run.stdout
    assert report.exists()


def leave_behind(mib: int) -> None:
    """A cycle that holds so much memory."""
    held: dict[str, Any] = {"data": b"\1" * (mib << 20)}
    held["itself"] = held


def test_growth_is_collected_and_a_little_is_not() -> None:
    """In a process of its own: a worker's settings of malloc, which other tests leave behind, keep freed memory."""
    program = f"from {__name__} import grow_and_collect; grow_and_collect()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def grow_and_collect() -> None:
    gc.collect()
    gc.disable()
    try:
        plugin, before_mib = Memory(), resident_mib()
        leave_behind(GROWTH_MIB // 2)
        plugin.pytest_runtest_logfinish()
        assert resident_mib() > before_mib + GROWTH_MIB // 4, "little is not worth a look at all objects"
        leave_behind(GROWTH_MIB)
        plugin.pytest_runtest_logfinish()
        assert resident_mib() < before_mib + GROWTH_MIB // 4
    finally:
        gc.enable()
