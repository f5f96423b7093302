"""The names in docs/architecture.md exist in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = re.findall(r"`([\w/]+\.py):(\w+)\.(\w+)`", (ROOT / "docs" / "architecture.md").read_text())


def test_every_step_names_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text[text.index("## A request's life") :]
    assert len(re.findall(r"^\d\. \*\*", life, re.MULTILINE)) == 8
    assert len(NAMES) >= 8


@pytest.mark.parametrize(("path", "owner", "method"), NAMES)
def test_name_exists(path: str, owner: str, method: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert owner in classes
    methods = {n.name for n in classes[owner].body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert method in methods
