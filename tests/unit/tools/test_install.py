"""The installer: what it makes of pip's output, and that pip takes uv's place."""

import io
import os
import sys
from pathlib import Path

import pytest

from tools import install

OUTPUT = """Obtaining file:///tandem
  Installing build dependencies: started
Collecting torch<2.14,>=2.11 (from tandem-serve==0.1.0)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (27 kB)
  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.2 MB)
Collecting six
  Downloading six-1.16.0-py2.py3-none-any.whl (11 kB)
Building wheels for collected packages: tandem-serve
Installing collected packages: six, torch, tandem-serve
Successfully installed six-1.16.0 tandem-serve-0.1.0 torch-2.13.0
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_each_step_is_told_and_long_ones_where_lines_stay() -> None:
    steps = list(install.progress(OUTPUT.splitlines()))
    assert steps == [
        ("1 package found", False),
        ("downloading torch 2.13.0", False),
        ("downloading torch 2.13.0, 190 MB", True),
        ("2 packages found", False),
        ("downloading six 1.16.0", False),
        ("building", False),
        ("unpacking 3 packages", True),
    ]
    log, terminal = io.StringIO(), Terminal()
    install.show(steps, log)
    assert log.getvalue().splitlines() == [
        "==> environment: downloading torch 2.13.0, 190 MB",
        "==> environment: unpacking 3 packages",
    ]
    install.show(steps, terminal)
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, in which PATH has no uv yet and Python is a script that notes how it is called."""
    program(
        tmp_path / "python", 'echo "python $*" >>calls; echo "Collecting six"; echo "ERROR: no six"; exit $(cat status)'
    )
    (tmp_path / "status").write_text("0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["install.py", "router,worker"])
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize(("uv", "ends"), [(None, 0), ("exit 0", 0), ("exit 2", 0), (None, 1)])
def test_uv_installs_where_it_can_and_pip_else(
    folder: Path, capfd: pytest.CaptureFixture[str], uv: str | None, ends: int
) -> None:
    (folder / "status").write_text(str(ends))
    if uv is not None:
        program(folder / "uv", f'echo "uv $*" >>calls; {uv}')
    assert install.main() == ends
    calls = [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
    assert calls == {None: ["python"], "exit 0": ["uv"], "exit 2": ["uv", "python"]}[uv]
    assert "--editable .[router,worker]" in (folder / "calls").read_text() or uv is None
    out = capfd.readouterr().out
    assert ("uv did not succeed" in out) == (uv == "exit 2")
    assert ("ERROR: no six" in out) == (ends == 1), "what pip said is shown when it fails"
