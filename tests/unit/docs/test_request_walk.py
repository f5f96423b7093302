"""Follows "A request's life" in docs/architecture.md: its modules define the names beside them, its records are few.

The modules that a request passes are counted in tests/integration/router/test_request_files.py.
"""

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
RECORDS = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \| .+ \|$", LIFE.split("### Records of a request")[1], re.MULTILINE)
MOST_RECORDS = 16


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


def test_a_request_is_few_records() -> None:
    assert len(set(RECORDS)) == len(RECORDS) <= MOST_RECORDS


@pytest.mark.parametrize(("record", "path"), RECORDS)
def test_a_record_is_defined_where_the_page_states(record: str, path: str) -> None:
    kind = "message" if path.endswith(".proto") else "class"
    assert re.search(rf"^{kind} {record}\b", (ROOT / path).read_text(), re.MULTILINE), path
