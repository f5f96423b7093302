"""Follows "A request's life" in docs/architecture.md: every module it lists exists and defines the names beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIFE = PAGE[PAGE.index("## A request's life") :]
STEPS = re.split(r"^(?=\d+\. \*\*)", LIFE, flags=re.MULTILINE)[1:]
CODE = re.compile(r"^   - `([\w/]+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)$", re.MULTILINE)
WALK = [(path, name) for path, names in CODE.findall(LIFE) for name in re.findall(r"`([\w.]+)`", names)]


def test_eight_numbered_steps_name_code() -> None:
    assert [step.partition(".")[0] for step in STEPS] == [str(number) for number in range(1, 9)]
    for step in STEPS:
        assert CODE.search(step), step


def test_every_item_of_a_step_is_read() -> None:
    assert len(re.findall(r"^ +- ", LIFE, re.MULTILINE)) == len(CODE.findall(LIFE))


@pytest.mark.parametrize(("path", "name"), WALK)
def test_a_module_defines_its_names(path: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        defined = {
            node.name: node.body
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert part in defined, f"{path} does not define {name}"
        body = defined[part]
