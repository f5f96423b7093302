"""Hooks of Git run what `make check` runs, with the same programs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]


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
