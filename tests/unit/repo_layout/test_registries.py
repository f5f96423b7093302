"""An addition to a registry is made wherever its names stand again: pages, rigs, random models, proofs.

CONTRIBUTING.md sends people here. Literals of other files are read without importing them: those import torch.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.clusterctl.commands import COMMANDS
from tandem.core.config import Disaggregation, PolicyName
from tandem.engine.families import FAMILIES
from tandem.kvtransfer.transports.registry import TRANSPORTS
from tandem.router.routing.policies import create_policy

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
SCHEMA = "deploy/helm/tandem/values.schema.json"
KERNELS = ROOT / "kernels" / "tandem" / "kernels"
OPERATIONS = sorted(path.parent.name for path in KERNELS.glob("*/__init__.py"))
TESTS = ROOT / "tests" / "unit" / "kernels"
IS_ITS_OWN_REFERENCE = {"fused_layer"}
"""Compared with the decoder that it computes all layers of."""
LOADED_BY_ITSELF = {"kv_payload"}
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


def hold(places: Mapping[str, Iterable[str]], names: Iterable[str]) -> None:
    """Each place has each name and no other. Reports all missing entries at once, a line for each."""
    known, found = {str(name) for name in names}, {place: set(map(str, there)) for place, there in places.items()}
    wrong = [f"{place} lacks {name}" for place, there in found.items() for name in sorted(known - there)]
    wrong += [
        f"{place} has {name}, which is unknown" for place, there in found.items() for name in sorted(there - known)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def named(path: str, names: Iterable[str], form: str) -> list[str]:
    """Return the names that a file has in this form."""
    text = (ROOT / path).read_text()
    return [name for name in map(str, names) if form.format(name) in text]


def is_made(name: PolicyName) -> bool:
    try:
        return create_policy(name, Disaggregation.AUTO).name is name
    except KeyError:
        return False


def test_every_routing_policy_is_made_tested_and_described() -> None:
    (row,) = re.findall(r"^\| `policy` \|.*", (DOCS / "configuration.md").read_text(), flags=re.MULTILINE)
    formulas = "tests/unit/router/routing/policies/test_formulas.py"
    places = {
        "router/tandem/router/routing/policies/__init__.py": filter(is_made, PolicyName),
        formulas: [PolicyName.COST, *named(formulas, PolicyName, "{}.prefill_scores(")],
        "the table in docs/routing.md": first_column("routing.md", "## Other policies"),
        "`policy` in docs/configuration.md": [name for name in PolicyName if name.value in row],
        "tools.chart_schema, to be run again,": named(SCHEMA, PolicyName, '"{}"'),
    }
    hold(places, PolicyName)


def test_every_model_family_has_a_row_a_random_model_and_proofs() -> None:
    random = literal("tools/random_model.py", "ARCHITECTURES")
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "unit" / "engine" / "model").glob("test_*.py"))
    of_families = {
        "the table in docs/models.md": first_column("models.md", "# Models"),
        "ARCHITECTURES in tools/random_model.py": random.values(),
    }
    of_models = {
        "FAMILIES in proof/exactness/__main__.py": literal("proof/exactness/__main__.py", "FAMILIES"),
        "tests/unit/engine/model": [m for m, kind in random.items() if f'"{m}"' in tests or f'"{kind}"' in tests],
    }
    hold(of_families, FAMILIES)
    hold(of_models, random)


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
        assert is_named_in(KERNELS / "warmup.py") is (operation not in LOADED_BY_ITSELF), "compiled at the start"


def test_every_transport_passes_the_conformance_suite_and_the_proof() -> None:
    """Pages and the help of `clusterctl up` have tests of their own."""
    places = {
        "NAMES in tests/integration/kvtransfer/rig.py": literal("tests/integration/kvtransfer/rig.py", "NAMES"),
        "TRANSPORTS in proof/transfer/plan.py": literal("proof/transfer/plan.py", "TRANSPORTS"),
    }
    hold(places, set(TRANSPORTS) - NEED_A_GPU)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_on_a_page(command: str) -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert any(re.search(rf"\bclusterctl {command}\b", page.read_text()) for page in pages)
