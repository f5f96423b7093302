"""What is added to a registry is added wherever its names stand again: pages, rigs, random models, proofs.

CONTRIBUTING.md sends people here. Literals of other files are read without importing them: those import torch.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl.commands import COMMANDS
from tandem.core.config import Disaggregation, PolicyName
from tandem.engine.families import FAMILIES
from tandem.kvtransfer.transports.registry import TRANSPORTS
from tandem.router.planning.policies import create_policy

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
KERNELS = ROOT / "kernels" / "tandem" / "kernels"
OPERATIONS = sorted(path.parent.name for path in KERNELS.glob("*/__init__.py"))
TESTS = ROOT / "tests" / "unit" / "kernels"
IS_ITS_OWN_REFERENCE = {"dense_row"}
"""Compared with the decoder that it computes all layers of."""
LOADED_BY_ITSELF = {"kv_wire"}
"""Its C code is used by transfers, not by steps."""
NEED_A_GPU = {"cuda_ipc", "nccl"}


def literal(path: str, name: str) -> Any:
    """The value that a file gives to `name`."""
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def first_column(page: str, after: str) -> list[str]:
    """Names in the first column of the first table behind `after`."""
    table = (DOCS / page).read_text().split(after)[1].split("\n|---")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)


def test_every_routing_policy_is_made_and_has_a_row() -> None:
    assert [create_policy(name, Disaggregation.AUTO).name for name in PolicyName] == list(PolicyName)
    assert set(first_column("routing.md", "## Other policies")) == set(PolicyName), "rows of docs/routing.md"
    (row,) = re.findall(r"^\| `policy` \|.*", (DOCS / "configuration.md").read_text(), flags=re.MULTILINE)
    assert [name for name in PolicyName if name.value not in row] == [], "`policy` in docs/configuration.md"


def test_every_model_family_has_a_row_a_random_model_and_proofs() -> None:
    assert set(first_column("models.md", "# Models")) == set(FAMILIES), "rows of docs/models.md"
    random = literal("tools/random_model.py", "ARCHITECTURES")
    assert set(random.values()) == set(FAMILIES), "tools/random_model.py"
    assert set(literal("proof/exactness/__main__.py", "FAMILIES")) == set(random), "proof/exactness"
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "unit" / "engine" / "model").glob("test_*.py"))
    assert [name for name, kind in random.items() if f'"{name}"' not in tests and f'"{kind}"' not in tests] == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_kernel_has_a_reference_and_tests(operation: str) -> None:
    def is_named_in(*tests: Path) -> bool:
        return any(re.search(rf"\b{operation}\b", test.read_text()) for test in tests)

    parts = {path.name for path in (KERNELS / operation).iterdir()}
    assert ("reference.py" in parts) is (operation not in IS_ITS_OWN_REFERENCE)
    assert is_named_in(*TESTS.glob("test_*.py"))
    if "triton.py" in parts:
        assert is_named_in(*(TESTS / "interpreter").glob("test_*.py"))
        assert is_named_in(TESTS / "test_triton_compiles.py")
    if "cpu.c" in parts:
        assert is_named_in(KERNELS / "cpu_code.py") is (operation not in LOADED_BY_ITSELF), "compiled at the start"


def test_every_transport_passes_the_conformance_suite_and_the_proof() -> None:
    """Pages, the help of `clusterctl up` and the chart's schema have tests of their own."""
    assert {*literal("tests/integration/kvtransfer/rig.py", "NAMES"), *NEED_A_GPU} == set(TRANSPORTS)
    assert {*literal("proof/transfer/plan.py", "TRANSPORTS"), *NEED_A_GPU} == set(TRANSPORTS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_on_a_page(command: str) -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert any(re.search(rf"\bclusterctl {command}\b", page.read_text()) for page in pages)
