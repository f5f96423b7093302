"""`make` checks that an environment is whole before it uses it: a partly made one is made again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/bin/sh
# In place of Python and pip: notes what it is asked for; `-m venv FOLDER` makes a whole environment.
echo "$0 $*" >> "$LOG"
case "$*" in
  "-m venv"*)
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && touch "$folder/pip" "$folder/pyvenv.cfg" ;;
  "-m ensurepip") test -e "$(dirname "$0")/../ensurable" && touch "$(dirname "$0")/../pip" ;;
  "-m pip --version") test -e "$(dirname "$0")/../pip" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(folder: Path) -> list[str]:
    """Return the commands run by `make venv`."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    environment = {"PATH": os.environ["PATH"], "LOG": str(log)}
    done = subprocess.run(
        ["make", "venv", f"PYTHON={folder / 'python3'}"], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.slow
def test_a_half_made_environment_is_made_again(folder: Path) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "pyvenv.cfg").touch()
    shutil.copy(folder / "python3", folder / ".venv" / "bin" / "python")  # Python is there, pip is not
    lines = make(folder)
    assert any("-m venv --clear .venv" in line for line in lines)
    assert any("tools/install.py" in line for line in lines)


@pytest.mark.slow
def test_one_that_was_made_without_pip_gets_it_and_is_kept(folder: Path) -> None:
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "pyvenv.cfg").touch()
    (folder / ".venv" / "ensurable").touch()
    shutil.copy(folder / "python3", folder / ".venv" / "bin" / "python")
    lines = make(folder)
    assert not any("-m venv" in line for line in lines)
    assert any("tools/install.py" in line for line in lines)


@pytest.mark.slow
def test_a_whole_one_is_kept_and_only_installed_into_again(folder: Path) -> None:
    assert any("-m venv .venv" in line for line in make(folder)), "nothing is cleared that is no environment"
    assert make(folder) == []
    os.utime(folder / "pyproject.toml", (2**31, 2**31))  # changed since
    lines = make(folder)
    assert not any("-m venv" in line for line in lines)
    assert any("tools/install.py" in line for line in lines)
