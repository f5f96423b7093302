"""Test helpers of tests: network namespaces and waits."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.nodes import __main__ as nodes
from tools import namespaces
from tools.namespaces import Machine, NoNamespacesError, machines
from tools.waiting import wait_for, wait_for_async

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


def never() -> int:
    return 0


def counting() -> Iterator[int]:
    yield from (0, 0, 3)


def test_what_came_is_returned() -> None:
    counts = counting()
    assert wait_for(lambda: next(counts)) == 3
    counts = counting()
    assert asyncio.run(wait_for_async(lambda: next(counts))) == 3

    async def look() -> int:
        return next(counts)

    counts = counting()
    assert asyncio.run(wait_for_async(look)) == 3


def test_what_did_not_come_is_named() -> None:
    with pytest.raises(AssertionError, match="the moon is full: not within 0 s"):
        wait_for(never, 0, "the moon is full")
    with pytest.raises(AssertionError, match=r"^never: not within 0 s"):
        wait_for(never, 0)
    with pytest.raises(AssertionError, match=r"lambda: never\(\) == 5.*: not within 0 s"):
        wait_for(lambda: never() == 5, 0)
    with pytest.raises(AssertionError, match=r"^never: not within 0 s"):
        asyncio.run(wait_for_async(never, 0))


def test_a_look_that_hangs_is_ended() -> None:
    async def run() -> None:
        forever = asyncio.Event()
        await wait_for_async(forever.wait, 0, "it hangs")

    with pytest.raises(AssertionError, match="it hangs"):
        asyncio.run(run())
