"""One word a thing: replaced words are no identifier, folder or file, and a class name has one definition."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = [
    path
    for root in sorted(path.parent for path in ROOT.glob("*/tandem"))
    if root.name != "protogen"
    for path in sorted((root / "tandem").rglob("*.py"))
]
REPLACED = re.findall(
    r"^\| (`.+`) \| (`.+`) \|",
    (ROOT / "docs" / "glossary.md").read_text().split("## Replaced names")[1].split("\n## ")[0],
    re.MULTILINE,
)
HOMONYMS = {
    "_Api": "four files of endpoints, each with its own private handler",
    "BlockCounts": "a record of the router, and its document of the admin port",
    "DesiredSource": "two Protocols of one store, each with what its reader needs",
    "MapPoint": "a record of the simulator, and its document in clusterctl's JSON",
    "SloClasses": "the router's classes, and their document of the admin port",
    "WorkerLoad": "two Protocols: load to choose victims by, load as admission control reads it",
    "WorkerStatus": "the controller's record, and its document of the admin port",
}
MOST_HOMONYMS = 12


def replaced(kind: str) -> set[str]:
    """Return the old words of one form: `folder/`, `module.py` or `Name`."""
    words = {word for old, _ in REPLACED for word in re.findall(r"`([^`]+)`", old)}
    if kind == "folder":
        return {word.rstrip("/") for word in words if word.endswith("/")}
    if kind == "module":
        return {word.removesuffix(".py") for word in words if word.endswith(".py")}
    return {word for word in words if re.fullmatch(r"\w+", word)}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_of(path: Path) -> set[str]:
    """Return every identifier that the module defines, reads or imports."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.alias):
            found.add(node.name)
    return found


def test_replaced_words_are_listed_with_their_replacement() -> None:
    assert len(REPLACED) > 60
    assert len(replaced("folder")) > 20
    assert len(replaced("module")) > 60
    assert len(replaced("name")) > 60


def test_no_folder_has_a_replaced_name() -> None:
    folders = {part for path in PRODUCT for part in path.relative_to(ROOT).parts[:-1]}
    assert len(folders) > 40
    assert folders & replaced("folder") == set()


def test_no_module_has_a_replaced_name() -> None:
    assert {path.stem for path in PRODUCT} & replaced("module") == set()


def test_no_identifier_is_a_replaced_name() -> None:
    old = replaced("name")
    found = {str(path.relative_to(ROOT)): sorted(names_of(path) & old) for path in PRODUCT}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_class_name_is_defined_once() -> None:
    classes = Counter(
        node.name for path in PRODUCT for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert len(classes) > 800
    assert {name for name, count in classes.items() if count > 1} == set(HOMONYMS)
    assert len(HOMONYMS) <= MOST_HOMONYMS
