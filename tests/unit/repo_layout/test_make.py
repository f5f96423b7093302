"""Test `make`, hooks and the forge: environment, generated code and programs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import genproto

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


def write(folder: Path, **files: str) -> None:
    (folder / "rpc").mkdir(parents=True)
    for name, text in files.items():
        (folder / "rpc" / f"{name}.py").write_text(text)


def test_stubs_follow_what_is_generated(tmp_path: Path) -> None:
    fresh, stubs = tmp_path / "fresh", tmp_path / "stubs"
    write(fresh, same_pb2="a", changed_pb2="b", new_pb2_grpc="c")
    write(stubs, same_pb2="a", changed_pb2="old", renamed_pb2="gone", by_hand="kept")
    stale, orphaned = genproto.differing(fresh, stubs)
    assert stale == ["rpc/changed_pb2.py", "rpc/new_pb2_grpc.py"]
    assert orphaned == ["rpc/renamed_pb2.py"]
    genproto.sync(fresh, stubs, stale, orphaned)
    assert genproto.differing(fresh, stubs) == ([], [])
    assert sorted(path.name for path in (stubs / "rpc").iterdir()) == [
        "by_hand.py",
        "changed_pb2.py",
        "new_pb2_grpc.py",
        "same_pb2.py",
    ]


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


def all_hooks() -> dict[str, dict[str, Any]]:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    return {hook["id"]: hook for hook in local["hooks"]}


def what_runs(command: str) -> tuple[str, ...]:
    """Return a command without flags, interpreter and output."""
    command = command.partition("||")[0].replace("$(PY)", "").replace("$(VENV)/bin/", "").replace(".venv/bin/", "")
    words = shlex.split(command)
    return tuple(word for word in words if word[0] != "-" and word not in (".", "env", "python"))


def test_hooks_are_the_checks_of_make() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    checks = [line.removeprefix("\t@") for line in recipe[1].splitlines() if "@echo" not in line]
    own = [hook["entry"] for hook in all_hooks().values() if hook["language"] == "system"]
    assert sorted(map(what_runs, own)) == sorted(map(what_runs, checks))
    assert ("ruff", "format") in map(what_runs, own)
    assert all(".venv/bin/" in entry for entry in own), "of the project's environment, so that versions are the same"


def test_a_subject_that_is_too_long_is_refused() -> None:
    pattern = re.compile(all_hooks()["subject"]["entry"], re.MULTILINE)
    assert pattern.search("x" * 73)
    assert not pattern.search("x" * 72 + "\n\n" + "y" * 90)


@pytest.mark.parametrize(
    "subject", ["Hold the lease", "Pass blocks on", "Address a bound", "Speed up a start", "Apply it", "fixup! Hold it"]
)
def test_an_imperative_subject_passes(subject: str) -> None:
    assert not re.search(all_hooks()["imperative"]["entry"], f"{subject}\n\nholds more", re.MULTILINE)


@pytest.mark.parametrize(
    "subject",
    [
        "Holds the lease",
        "Passes blocks on",
        "Fixed a bound",
        "Speeding up a start",
        "A lease is held",
        "hold it",
        "x: y",
    ],
)
def test_another_subject_is_refused(subject: str) -> None:
    assert re.search(all_hooks()["imperative"]["entry"], f"{subject}\n\nHold more", re.MULTILINE)


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def document(*path: str) -> Any:
    return yaml.safe_load(ROOT.joinpath(*path).read_text())


def test_the_workflow_runs_what_ci_runs_everywhere() -> None:
    workflow = document(".github", "workflows", "ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert job["runs-on"].startswith("ubuntu")
    assert job["timeout-minutes"] == 90
    (python,) = [step["with"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert least == f">={python['python-version']}"
    (kept,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert (kept["with"]["path"], kept["if"]) == ("build/*.out", "${{ !cancelled() }}")
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_is_one_that_forges_take(form: Path) -> None:
    found = document(str(form))
    assert {"name", "description", "body"} <= set(found)
    names = [field["id"] for field in found["body"]]
    assert len(names) == len(set(names))
    for field in found["body"]:
        assert field["type"] in {"textarea", "input"}
        assert field["attributes"]["label"]


def test_a_bug_is_told_with_what_is_needed_to_repeat_it() -> None:
    fields = {field["id"]: field for field in document(".github", "ISSUE_TEMPLATE", "bug.yml")["body"]}
    needed = {name for name, field in fields.items() if field.get("validations", {}).get("required")}
    assert needed == {"what", "command", "version", "doctor", "level"}
    assert "clusterctl doctor -o json" in fields["doctor"]["attributes"]["description"]
    assert "logs" in fields
