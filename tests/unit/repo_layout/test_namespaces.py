"""Where there can be no machines: the reason is reported, none of those made is left, and no promise is broken."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from proof.nodes import __main__ as nodes
from tools import namespaces
from tools.namespaces import Machine, NoNamespacesError, machines

IP = """#!/bin/sh
case "$1 $2" in
"netns add") touch "$NAMESPACES/$3" ;;
"netns del") rm "$NAMESPACES/$3" ;;
"link add") echo "Unknown device type." >&2; exit 2 ;;
esac
"""
"""A kernel without veth."""


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each namespace that there is; `ip` makes them, and can make no wire."""
    program, found = tmp_path / "bin" / "ip", tmp_path / "netns"
    program.parent.mkdir()
    found.mkdir()
    program.write_text(IP)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NAMESPACES", str(found))
    monkeypatch.setattr(namespaces, "_NAMESPACES", found)
    return found


@pytest.mark.slow
def test_without_wires_it_says_why_and_leaves_nothing(left: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    with pytest.raises(NoNamespacesError, match="Unknown device type"), machines(tmp_path / "m", ("a", "b", "c")):
        pass
    assert list(left.iterdir()) == []


@pytest.mark.slow
def test_a_machine_that_cannot_be_emptied_does_not_keep_the_others(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(machine: Machine) -> None:
        raise TimeoutError(f"something runs on {machine.address}")

    monkeypatch.setattr(Machine, "kill", hang)
    (tmp_path / "m").mkdir()
    with pytest.raises(TimeoutError, match="something runs on a"), machines(tmp_path / "m", ("a", "b")):
        pass
    assert list(left.iterdir()) == []


@pytest.mark.slow
def test_the_proof_runs_nothing_and_calls_no_promise_broken(
    left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nodes", "--out", str(tmp_path / "nodes.json")])
    assert nodes.main() == 2
    error = capsys.readouterr().err
    assert error == "nothing was run: network namespaces are not to be had here: Unknown device type.\n"
    assert (list(left.iterdir()), (tmp_path / "nodes.json").exists()) == ([], False)
