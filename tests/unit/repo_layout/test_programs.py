"""`make bench` and `make proof` list what there is, refuse what there is not, and run what is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "tools" / "programs.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_without_a_name_a_list_with_what_each_does() -> None:
    code, out, _ = run("bench", "", "--out", "")
    assert code == 0
    names = {path.parent.name for path in ROOT.glob("bench/*/__main__.py")}
    assert names <= {line.split("NAME=")[1].split()[0] for line in out.splitlines()}
    assert all(len(line.split(maxsplit=3)) == 4 for line in out.splitlines()), "a program without a docstring"


@pytest.mark.slow
def test_an_unknown_name_lists_the_known_ones() -> None:
    code, out, error = run("proof", "no-such-proof")
    assert (code, out) == (2, "")
    assert "proof/ has no 'no-such-proof'. There are:" in error


@pytest.mark.slow
def test_a_name_runs_its_program_with_further_arguments() -> None:
    code, out, _ = run("bench", "serve", "--help")
    assert code == 0
    assert "usage" in out
