"""`breakpoint()` in a process without a terminal: real processes at both ends of the socket."""

import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.controlplane.environment import Environment
from tandem.core import breakpoints
from tools.waiting import PATIENCE_S, wait_for

PROGRAM = """
def doubled(number):
    twice = 2 * number
    breakpoint()
    return twice + 1
for number in range(3):
    print("got", doubled(number), flush=True)
"""


@pytest.fixture
def variables() -> Iterator[dict[str, str]]:
    """Yield the variables of a child of `up`, with sockets of its own, in a folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        yield Environment.read({**os.environ, "TMPDIR": folder}).for_child(threads=1)


@contextmanager
def standing(tmp_path: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has come to its first breakpoint, or is about to."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def attach(variables: dict[str, str], commands: str) -> str:
    """Return the output of a debugger that gets these commands."""
    command = [sys.executable, "-m", "tandem.core.breakpoints"]
    ended = subprocess.run(
        command, env=variables, input=commands, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return ended.stdout


def test_children_of_up_have_the_hook_unless_the_operator_has_one() -> None:
    assert pkgutil.resolve_name(Environment.read({}).for_child(threads=1)["PYTHONBREAKPOINT"]) is breakpoints.stand
    assert Environment.read({"PYTHONBREAKPOINT": "0"}).for_child(threads=1)["PYTHONBREAKPOINT"] == "0"


def test_a_debugger_stays_from_breakpoint_to_breakpoint(tmp_path: Path, variables: dict[str, str]) -> None:
    with standing(tmp_path, variables) as process:
        shown = attach(variables, "p twice\nn\nc\np twice\nc\np twice\nq\n")
        assert process.stdout is not None
        assert process.stdout.read() == "got 1\ngot 3\ngot 5\n"
    assert f"attached to process {process.pid}" in shown
    assert re.findall(r"^(?:\(Pdb\) )*(\d+)$", shown, re.MULTILINE) == ["0", "2", "4"]
    assert "-> return twice + 1" in shown


@pytest.mark.parametrize("last_words", ["q\n", "exit\n", ""], ids=["quit", "exit", "hung up"])
def test_a_debugger_that_leaves_lets_it_go_on(tmp_path: Path, variables: dict[str, str], last_words: str) -> None:
    with standing(tmp_path, variables) as process:
        for value in (0, 2, 4):
            assert f"(Pdb) {value}\n" in attach(variables, f"p twice\n{last_words}")
        assert process.wait(PATIENCE_S) == 0


def test_one_that_was_killed_leaves_nothing_that_is_in_the_way(tmp_path: Path, variables: dict[str, str]) -> None:
    folder = Path(variables["TMPDIR"]) / f"tandem-breakpoints-{os.getuid()}"
    with standing(tmp_path, variables) as dead:
        wait_for(lambda: folder.is_dir() and any(folder.iterdir()), what="it stands")
        dead.kill()
        dead.wait(PATIENCE_S)
    with standing(tmp_path, variables) as process:
        shown = attach(variables, "q\n")
        assert f"attached to process {process.pid}" in shown
    assert not any(path.name.startswith(f"{dead.pid}-") for path in folder.iterdir())


def test_sockets_that_others_may_open_are_refused(variables: dict[str, str]) -> None:
    folder = Path(variables["TMPDIR"]) / f"tandem-breakpoints-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    command = [sys.executable, "-c", "breakpoint()"]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "PermissionError" in ended.stderr
