"""Folders against the lists that name them: pyproject, the architecture page, the import graph."""

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL: dict[str, Any] = PROJECT["tool"]
EDITOR: dict[str, Any] = json.loads((ROOT / ".vscode" / "settings.json").read_text())
ROOTS = sorted(path.parent.name for path in ROOT.glob("*/tandem") if any(path.rglob("*.py")))
NO_IMPORT = {"proto", "deploy", "bench", "tests", "proof", "docs", "models", "tools"}


def _package(root: str) -> str:
    return "rpc" if root == "protogen" else root


@pytest.mark.parametrize(
    ("where", "listed"),
    [
        ("hatch dev-mode-dirs", TOOL["hatch"]["build"]["dev-mode-dirs"]),
        ("mypy_path", TOOL["mypy"]["mypy_path"]),
        ("pyright extraPaths", TOOL["pyright"]["extraPaths"]),
        ("VS Code extraPaths", EDITOR["python.analysis.extraPaths"]),
        ("ruff src", [name for name in TOOL["ruff"]["src"] if name != "tests"]),
        ("wheel packages", [p.removesuffix("/tandem") for p in TOOL["hatch"]["build"]["targets"]["wheel"]["packages"]]),
    ],
)
def test_every_source_root_is_listed(where: str, listed: list[str]) -> None:
    assert sorted(listed) == ROOTS, where


def test_mypy_checks_every_source_root_and_all_other_code() -> None:
    files = set(TOOL["mypy"]["files"])
    assert files >= set(ROOTS) - {"protogen"}
    assert {name for name in ("tests", "tools", "bench", "proof") if any((ROOT / name).rglob("*.py"))} <= files


@pytest.mark.parametrize("root", ROOTS)
def test_a_root_holds_its_one_package_and_leaves_the_namespace_open(root: str) -> None:
    """An `__init__.py` directly in `*/tandem/` would hide every other component."""
    children = {path.name for path in (ROOT / root / "tandem").iterdir() if path.name != "__pycache__"}
    assert children == {_package(root)}
    if root != "protogen":
        assert (ROOT / root / "tandem" / root / "__init__.py").is_file()


def test_import_linter_sees_every_package() -> None:
    """Namespace packages that the graph misses would pass every contract."""
    graph = grimp.build_graph("tandem", cache_dir=None)
    assert graph.find_children("tandem") == {f"tandem.{_package(root)}" for root in ROOTS}
    modules = [path for root in ROOTS for path in (ROOT / root / "tandem").rglob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= len(graph.modules)


def test_the_layers_name_every_package() -> None:
    contracts = TOOL["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "Layers of the source roots")
    named = {name.strip() for layer in layers for name in layer.split("|")}
    assert named == {f"tandem.{_package(root)}" for root in ROOTS}


def test_the_architecture_page_maps_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().split("## Folders")[1].split("## ")[0]
    mapped = set(re.findall(r"^\| `(\w+)/`", text, flags=re.MULTILINE))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    tracked = folders & (set(ROOTS) | NO_IMPORT)
    assert mapped == {name for name in tracked if any(p.is_file() for p in (ROOT / name).rglob("*"))}


def test_the_architecture_page_maps_every_package_of_the_router() -> None:
    """In the order of the layers that import-linter holds."""
    page = (ROOT / "docs" / "architecture.md").read_text().split("### Packages of the router")[1].split("\n## ")[0]
    mapped = re.findall(r"^\| `(\w+)/`", page, flags=re.MULTILINE)
    inside = (ROOT / "router" / "tandem" / "router").iterdir()
    packages = {path.name for path in inside if path.is_dir() and path.name != "__pycache__"}
    contracts = {contract["name"]: contract for contract in TOOL["importlinter"]["contracts"]}
    layers = [name.strip() for layer in contracts["Packages of the router"]["layers"] for name in layer.split("|")]
    assert set(mapped) == packages
    assert mapped == [name for name in layers if name in packages]


def test_every_module_says_what_it_owns() -> None:
    """A module without a docstring gives a newcomer no information."""
    silent = []
    for path in (p for root in ROOTS if root != "protogen" for p in (ROOT / root / "tandem").rglob("*.py")):
        text = path.read_text().lstrip()
        if text and not text.startswith(('"""', 'r"""')):
            silent.append(str(path.relative_to(ROOT)))
    assert not silent


def test_no_drawer_for_odds_and_ends() -> None:
    names = {"utils", "helpers", "common", "misc", "util", "helper"}
    assert not [p for root in ROOTS for p in (ROOT / root / "tandem").rglob("*") if p.stem in names]


TERMS = (
    "request attempt choice prefill decode block block table ticket lease incarnation plan drain TTFT ITL TPOT goodput"
).replace("block block table", "block block-table")


@pytest.mark.parametrize("term", TERMS.split())
def test_the_glossary_defines_our_words(term: str) -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text().lower()
    assert f"**{term.replace('-', ' ').lower()}**" in glossary


def test_decisions_fit_a_page() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert records
    for record in records:
        assert re.fullmatch(r"\d{4}-[a-z0-9-]+\.md", record.name)
        assert len(record.read_text().splitlines()) <= 60, record.name


MOST_LINES, MOST_FUNCTION_LINES = 500, 80
CODE = {".py", ".proto", ".c", ".h", ".md", ".toml"}
"""Files that people write, beside the Makefile and .ci/run; results and corpora are data."""


def _written() -> list[Path]:
    """All that people write here, but the changelog, which only grows, and what is generated."""
    folders = (ROOT / name for name in (*ROOTS, "proto", "docs", "models", ".ci", *HOUSES) if name != "protogen")
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    files += [path for path in ROOT.iterdir() if path.name not in {"CHANGELOG.md", "LICENSE"}]
    return [path for path in files if path.is_file() and (path.suffix in CODE or path.name in {"Makefile", "run"})]


def test_no_file_is_longer_than_a_head_is_wide() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _written()}
    assert {"Makefile", "README.md", "proto/tandem/rpc/v1/worker.proto", "docs/transfer/links.md"} <= set(lengths)
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_function_is_longer_than_two_screens() -> None:
    """Kernels apart: what a GPU runs as one is one function."""
    long = {}
    for path in (path for path in _written() if path.suffix == ".py" and ROOT / "kernels" not in path.parents):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long[f"{path.relative_to(ROOT)}:{node.name}"] = lines
    assert len(long) > 1000
    assert not {name: lines for name, lines in long.items() if lines > MOST_FUNCTION_LINES}


HOUSES = ("tools", "bench", "proof", "tests")
"""Beside the components; each may import those before it."""


def test_what_tools_benches_proofs_and_tests_may_import() -> None:
    """Rigs of `tests` are no tests: proofs drive them, too. Only a module that runs a conformance suite imports a
    test."""
    wrong = []
    for house in HOUSES:
        for path in (ROOT / house).rglob("*.py"):
            is_test = path.stem.startswith("test_") or path.stem == "conftest"
            for name in _imports(path):
                to, is_of_test = name.split(".")[0], ".test_" in name.replace(".conformance.test_", ".")
                is_later = to in HOUSES and HOUSES.index(to) > HOUSES.index(house)
                is_rig_for_proof = (house, to) == ("proof", "tests") and not is_of_test
                is_proof_for_rig = (house, to) == ("tests", "proof") and not is_test
                if is_of_test or is_proof_for_rig or (is_later and not is_rig_for_proof):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def _imports(path: Path) -> list[str]:
    """Every module that it imports, anywhere in it; what it takes out of a package counts as one."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower())]
    return [name for name in found if name.split(".")[0] in HOUSES]
