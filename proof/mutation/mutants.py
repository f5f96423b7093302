"""The mutants of a file: cosmic-ray's, without those that change no behaviour in any code around them."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_db import WorkDB, use_db

Position = tuple[int, int]
_SAME = ("_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq")
"""Identity in place of equality, or the other way round: the same for nearly all values compared here, small numbers,
enums, None and objects that are equal only to themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The `occurrence`-th place in `file` where `operator` applies, which is in this `line`."""

    file: str
    operator: str
    occurrence: int
    line: int

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line} {self.operator.rpartition('/')[2]} #{self.occurrence}"

    def source(self, code: str) -> str | None:
        """The file with the change; None if `code` has no such place."""
        changed: str | None = mutate_code(code, cosmic_ray.plugins.get_operator(self.operator)(), self.occurrence)
        return changed


def mutants(root: Path, files: Sequence[str]) -> list[Mutant]:
    """All mutants of these files, in order."""
    with tempfile.TemporaryDirectory(prefix="td-") as folder, use_db(Path(folder) / "db", WorkDB.Mode.create) as db:
        init([root / file for file in files], db, {})
        found = [spec for item in db.work_items for spec in item.mutations]
    silent = {file: list(_silent((root / file).read_text())) for file in files}
    unreached = {file: _unreached((root / file).read_text()) for file in files}
    kept = []
    for spec in found:
        file = Path(spec.module_path).relative_to(root).as_posix()
        begin: Position = tuple(spec.start_pos)
        if spec.operator_name.endswith(_SAME) or begin[0] in unreached[file]:
            continue
        if not any(first <= begin < last for first, last in silent[file]):
            kept.append(
                Mutant(file=file, operator=spec.operator_name, occurrence=spec.occurrence, line=spec.start_pos[0])
            )
    return kept


def _silent(code: str) -> Iterator[tuple[Position, Position]]:
    """Places where a change has no effect: annotations are not evaluated, nor is anything of a signature but its
    defaults, records are frozen for mypy and have slots for speed, zip asserts that lengths are equal, and texts of
    errors and log lines are for people."""
    for node in ast.walk(ast.parse(code)):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _around_defaults(node)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "event":
            parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "zip":
            parts = [keyword.value for keyword in node.keywords]
        elif isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:  # from its "@" on
                yield (decorator.lineno, 0), _span(decorator)[1]
        for part in parts:
            if part is not None:
                yield _span(part)


def _around_defaults(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[Position, Position]]:
    """The signature from "def" to the body, without the defaults."""
    begin = (function.lineno, function.col_offset)
    for default in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
        first, last = _span(default)
        yield begin, first
        begin = last
    yield begin, _span(function.body[0])[0]


def _unreached(code: str) -> set[int]:
    """Lines marked as out of reach of any test."""
    return {number for number, line in enumerate(code.splitlines(), 1) if "pragma: no cover" in line}


def _span(node: ast.AST) -> tuple[Position, Position]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
