"""Shared by all benchmarks: rows, a table for people, JSON for machines. Not a benchmark itself."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `limit` is the baseline or machine limit measured in the same run; `ratio` = value / limit."""

    case: str
    metric: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.limit if self.limit else None


def arguments_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the argument that every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"bench.{name}", description=doc)
    parser.add_argument("--out", type=Path, default=None)
    return parser


def machine() -> str:
    """Processor, cores and Python, in words."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is checked out, short; "" outside a git repository, or without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    except FileNotFoundError:
        return ""


def publish(name: str, rows: Sequence[Row], out: Path | None, **more: Any) -> None:
    """Print the table and write the JSON, with `more` as in `write`, if a place for it was given."""
    show(rows)
    if out is not None:
        write(name, rows, out, **more)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    width, names = max(len(row.case) for row in rows), max(len(row.metric) for row in rows)
    for row in rows:
        limit = "" if row.limit is None else f"   limit {row.limit:10.3f}   ratio {row.ratio or 0:.2f}"
        print(f"{row.case:{width}}  {row.metric:{names}} {row.value:10.3f} {row.unit:8}{limit}")


def write(name: str, rows: Sequence[Row], out: Path, **more: Any) -> None:
    """Write the JSON, at once or not at all. `more` is written beside it: the `load` for `kept`, or another
    `commit`."""
    values = [{**asdict(row), "ratio": row.ratio} for row in rows]
    record: dict[str, Any] = {"name": name, "commit": commit(), "machine": machine(), "rows": values, **more}
    replace_text(out, json.dumps(record, indent=1) + "\n")


def replace_text(out: Path, text: str) -> None:
    """Write a file atomically; its folder is made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(out)


def kept(out: Path | None, load: Mapping[str, Any]) -> list[Row]:
    """The rows in `out` of a run that was stopped, if this commit measured them under the same load; else none."""
    if out is None or not out.exists():
        return []
    record = json.loads(out.read_text())
    if record.get("load") != load or record.get("commit") != commit():
        return []
    return rows_in(record)


def rows_in(record: Mapping[str, Any]) -> list[Row]:
    """Rows of a file that `write` made."""
    return [Row(**{field.name: row[field.name] for field in fields(Row)}) for row in record["rows"]]


def quantile(values: Sequence[float], percent: int) -> float:
    """The quantile, interpolated between neighbours; of a single value that value."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]
