"""CONTRIBUTING.md is one page, and the files on a request's path are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STEPS = re.findall(r"^\d\. (.*(?:\n   .*)*)", PAGE.split("## Path of a request")[1].split("\n## ")[0], re.MULTILINE)


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 120
    assert max(map(len, PAGE.splitlines())) <= 120


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("**")[1])
def test_a_step_names_files_of_its_packages(step: str) -> None:
    """Short paths are meant from a package that the step has named before with a whole path."""
    packages: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", step):
        if whole := re.match(r"(\w+/tandem/\w+)/", name):
            packages.append(ROOT / whole[1])
            assert (ROOT / name).is_file(), name
        else:
            assert any((package / name).is_file() for package in packages), name
    assert packages


def test_there_are_eight_steps() -> None:
    assert len(STEPS) == 8
