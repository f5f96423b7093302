"""Counts words in docstrings and comments that CONTRIBUTING.md tells to avoid: `python -m tools.language PATH…`.

A process is not a person: it reports, sends and receives, and a sentence names its subject.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
HABITS: Final = {
    "who": re.compile(r"\b(?:who|whom|whose|whoever)\b", re.IGNORECASE),
    "nobody": re.compile(r"\b(?:nobody|somebody|everybody|anybody)\b", re.IGNORECASE),
    "says": re.compile(r"\b(?:say|says|said|tell|tells|told|hear|hears|heard)\b", re.IGNORECASE),
}
"""Name of a habit → its words."""
MOST: Final = {"who": 0.3, "nobody": 0.3, "says": 0.5}
"""At most so many in 1,000 words."""
CLAUSE: Final = re.compile(r"\s*(?:What|Who|Whether|Which|Whose)\b")
"""The first words of a summary that is a clause and no sentence."""
_CODE: Final = re.compile(r"`[^`]*`")
_STATEMENTS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
_STRING_OR_COMMENT: Final = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)''',
    re.DOTALL,
)
"""The parts of a module in which a `#` may stand; `tokenize` takes ten times as long."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every docstring, attribute docstring and comment of a module."""
    unread: list[ast.AST] = [ast.parse(source)]
    for node in unread:
        unread += (each for field in _STATEMENTS for each in getattr(node, field, ()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                value = each.value if isinstance(each, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield each.lineno, value.value
    line, counted = 1, 0
    for token in _STRING_OR_COMMENT.finditer(source):
        if token["comment"]:
            line, counted = line + source.count("\n", counted, token.start()), token.start()
            yield line, token["comment"]


def files(folders: Iterable[str]) -> list[Path]:
    """Return the tracked Python files below `folders`, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [ROOT / name for name in listed.split("\0") if name and not name.startswith("protogen/")]


def count(paths: Iterable[Path], show: bool = False) -> Counter[str]:
    """Count words, habits and clauses, names in backticks apart; with `show`, print each place."""
    found: Counter[str] = Counter()
    for path in paths:
        for line, text in texts(path.read_text()):
            plain = _CODE.sub("", text)
            found["words"] += len(re.findall(r"[A-Za-z']+", plain))
            hits = [name for name, words in HABITS.items() for _ in words.findall(plain)]
            hits += ["clause"] if CLAUSE.match(plain) else []
            found.update(hits)
            if hits and show:
                print(f"{path.relative_to(ROOT)}:{line}: {' '.join(hits)}: {' '.join(plain.split())[:100]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", default=["."], metavar="PATH")
    found = count(files(parser.parse_args().folders), show=True)
    for name in (*HABITS, "clause"):
        print(f"{name:8} {found[name]:5}  {1000 * found[name] / max(1, found['words']):.2f} in 1,000 words")


if __name__ == "__main__":
    main()
