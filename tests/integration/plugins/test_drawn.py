"""Cases that the seed does not draw are deselected, by the same rule in every run of that seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.plugins.drawn import FULL

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
