"""Print the test files that a change can affect: those that import a changed module, directly or through others, and
those that name a changed file.

The change is what differs from the merge base with `--base` (default: the commit before the last, or `main` on another
branch), committed or not. A changed file that no import leads to, such as a page or a C source, affects the tests that
name it or its folder; a changed `conftest.py` affects the tests of its folder.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
HOUSES = ("tests", "tools", "bench", "proof")


def changed_files(base: str) -> list[str]:
    """Paths below the project's folder, of files that are new, changed or gone. Raises ValueError for a wrong base."""
    lines: list[str] = []
    for command in (["diff", "--name-only", "--no-renames", base], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr.strip())
        lines += done.stdout.splitlines()
    return sorted(set(lines))


def default_base() -> str:
    """The branch point from `main`; on `main` itself the newest commit's parent."""
    for command in (["merge-base", "main", "HEAD"], ["rev-parse", "HEAD~1"]):
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout != head.stdout:
            return done.stdout.strip()
    return "HEAD"


def module_of(path: str) -> str:
    """The dotted name of a Python file: `tandem.…` below a source root, else from its folders."""
    parts = Path(path).with_suffix("").parts
    if len(parts) > 2 and parts[1] == "tandem":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(path: str) -> set[str]:
    """The module that a file is, or, for a file beside Python such as a C source, those of its folder and below."""
    if path.endswith(".py"):
        return {module_of(path)}
    folder = (ROOT / path).parent
    is_inside = "tandem" in Path(path).parts[1:2] and folder.is_dir()
    return {module_of(str(other.relative_to(ROOT))) for other in folder.rglob("*.py")} if is_inside else set()


@cache
def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, and for `from a import b` also `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def importers(changed: set[str]) -> set[str]:
    """The changed modules of the product and all that import them, through any number of others."""
    graph, found = _graph(), set(changed)
    for module in changed & graph.modules:
        found |= graph.find_downstream_modules(module)
    return found


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("tandem", cache_dir=None)


def affected(changed: Iterable[str]) -> list[str]:
    """Test files, as paths below the project's folder."""
    changed = list(changed)
    touched = importers({module for path in changed for module in modules_of(path)})
    files = {str(path.relative_to(ROOT)): path for house in HOUSES for path in (ROOT / house).rglob("*.py")}
    imports = {name: imports_of(path) for name, path in files.items()}
    reached = {name for name in files if name in changed or imports[name] & touched}
    while more := {n for n in files if n not in reached and imports[n] & {module_of(r) for r in reached}}:
        reached |= more
    names = {word for path in changed if not path.endswith(".py") for word in (path, Path(path).name)}
    reached |= {n for n in files if names and any(word in files[n].read_text() for word in names)}
    folders = [f"{Path(name).parent}/" for name in reached if Path(name).name == "conftest.py"]
    tests = {n for n in files if Path(n).name.startswith("test_") and n.startswith("tests/")}
    return sorted(n for n in tests if n in reached or n.startswith(tuple(folders)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="the commit to compare with")
    options = parser.parse_args()
    try:
        changed = changed_files(options.base or default_base())
    except ValueError as error:
        print(f"cannot tell what changed: {error}. Name a commit with --base.", file=sys.stderr)
        return 2
    for name in affected(changed):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
