"""Draw which packages import which: `make graph OUT=build/graph.svg`; with `NAME=router`, what is inside that package.

Imports are read by grimp, as import-linter reads them. Rows are those of its contracts in pyproject.toml; without one,
they follow from the imports. OUT ends in .svg, .png or .pdf (drawn by matplotlib), .dot (Graphviz) or .mmd
(Mermaid).
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).resolve().parent.parent
LOOSE = "(modules)"
"""The box of all modules that lie in no folder of a package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportGraph:
    """`rows` of boxes, importers above; `sizes`: modules of a box; `imports`: from box to box, in pairs of modules."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    imports: Mapping[tuple[str, str], int]

    @property
    def implied(self) -> frozenset[tuple[str, str]]:
        """Imports that others imply: of A by C, where C imports B and B leads to A."""
        reach = _reach(self.sizes, self.imports)
        found = set()
        for importer, imported in self.imports:
            others = {b for a, b in self.imports if a == importer} - {imported}
            between = [one for one in others if importer not in reach[one] and one not in reach[imported]]
            if any(imported in reach[one] for one in between):
                found.add((importer, imported))
        return frozenset(found)


def read(name: str = "", *, with_modules: bool = False) -> ImportGraph:
    """Read the packages of `tandem`, or the content of the one of this name. Raises ValueError if there is none.

    Modules beside the folders of a package share a box, unless `with_modules`, or if there is no folder.
    """
    modules = grimp.build_graph("tandem", cache_dir=None)
    root = f"tandem.{name}" if name else "tandem"
    if root not in modules.modules or not modules.find_children(root):
        names = sorted(child.removeprefix("tandem.") for child in modules.find_children("tandem"))
        raise ValueError(f"there is no package {name!r}; there are: {', '.join(names)}")
    inside = [module for module in modules.modules if module.startswith(f"{root}.")]
    folders = {module for module in modules.find_children(root) if modules.find_children(module)}
    contract = _contract(root)
    has_boxes_of_modules = with_modules or not folders or bool(contract)

    def box(module: str) -> str:
        child = ".".join(module.split(".")[: root.count(".") + 2])
        is_own = child in folders or has_boxes_of_modules
        return child.removeprefix(f"{root}.") if is_own else LOOSE

    imports: Counter[tuple[str, str]] = Counter()
    for module in inside:
        for imported in modules.find_modules_directly_imported_by(module):
            if imported.startswith(f"{root}.") and box(module) != box(imported):
                imports[box(module), box(imported)] += 1
    sizes = Counter(map(box, inside))
    rows = contract or _rows(sizes, imports)
    title = f"{root}: {len(inside)} modules"
    return ImportGraph(title=title, rows=rows, sizes=sizes, imports=dict(sorted(imports.items())))


def dot(graph: ImportGraph) -> str:
    """The graph in Graphviz' format."""
    lines = [f'digraph "{graph.title}" {{', "  node [shape=box];"]
    lines += [f"  {{ rank=same; {' '.join(f'{_quoted(name)};' for name in row)} }}" for row in graph.rows]
    lines += [f"  {_quoted(a)} -> {_quoted(b)} [label={count}];" for (a, b), count in graph.imports.items()]
    return "\n".join([*lines, "}", ""])


def mermaid(graph: ImportGraph) -> str:
    """The graph in Mermaid's format. Boxes have numbers: a name may be a keyword there."""
    boxes = {name: f"b{number}" for number, name in enumerate(name for row in graph.rows for name in row)}
    lines = ["flowchart TD", *(f'  {box}["{name}"]' for name, box in boxes.items())]
    lines += [f"  {boxes[a]} -->|{count}| {boxes[b]}" for (a, b), count in graph.imports.items()]
    return "\n".join([*lines, ""])


def _quoted(name: str) -> str:
    return f'"{name}"'


def _contract(root: str) -> tuple[tuple[str, ...], ...]:
    """Rows of boxes in import-linter's contract for the content of `root`; none if there is no such contract."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract["type"] != "layers":
            continue
        containers = contract.get("containers", [])
        if containers == [root] or (not containers and root == "tandem"):
            rows = ([name.strip() for name in row.split("|")] for row in contract["layers"])
            return tuple(tuple(name.removeprefix("tandem.") for name in row) for row in rows)
    return ()


def _rows(sizes: Mapping[str, int], imports: Mapping[tuple[str, str], int]) -> tuple[tuple[str, ...], ...]:
    """A box stands above all that it imports; those that import each other stand side by side."""
    reach = _reach(sizes, imports)
    heights: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: len(reach[name] | {name})):
        below = [heights[other] for other in reach[name] if name not in reach[other]]
        heights[name] = max(below, default=-1) + 1
    return tuple(
        tuple(sorted(name for name in sizes if heights[name] == height))
        for height in range(max(heights.values(), default=-1), -1, -1)
    )


def _reach(sizes: Mapping[str, int], imports: Mapping[tuple[str, str], int]) -> dict[str, set[str]]:
    """For each box, those that its imports lead to."""
    direct: dict[str, set[str]] = {name: set() for name in sizes}
    for importer, imported in imports:
        direct[importer].add(imported)
    found = {}
    for name in sizes:
        seen: set[str] = set()
        waiting = list(direct[name])
        while waiting:
            if (one := waiting.pop()) not in seen:
                seen.add(one)
                waiting += direct[one]
        found[name] = seen
    return found


def write(graph: ImportGraph, out: Path) -> None:
    """Write the graph to `out`. Raises ValueError for a file name without a known ending."""
    if out.suffix not in {".dot", ".mmd", ".svg", ".png", ".pdf"}:
        raise ValueError(f"{out} ends in none of .svg, .png, .pdf, .dot, .mmd")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".dot":
        out.write_text(dot(graph))
    elif out.suffix == ".mmd":
        out.write_text(mermaid(graph))
    else:
        from tools.layered_picture import draw  # matplotlib takes a second

        draw(graph, out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="a package, such as router; without it, all packages")
    parser.add_argument("--out", default="", help="the picture; its ending says the form [build/graph.svg]")
    parser.add_argument("--modules", action="store_true", help="every module beside the folders is a box of its own")
    given = parser.parse_args()
    out = Path(given.out or "build/graph.svg")
    try:
        write(read(given.name, with_modules=given.modules), out)
    except ValueError as error:
        sys.stderr.write(f"import_graph: {error}\n")
        return 2
    print(f"==> {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
