"""What all benchmarks share: rows, a table for people, JSON for machines. Not a benchmark itself."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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


def machine() -> str:
    """Processor, cores and Python, in words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def publish(name: str, rows: Sequence[Row], out: Path | None) -> None:
    """Print the table and write the JSON, if a place for it was given."""
    width, names = max(len(row.case) for row in rows), max(len(row.metric) for row in rows)
    for row in rows:
        limit = "" if row.limit is None else f"   limit {row.limit:10.3f}   ratio {row.ratio or 0:.2f}"
        print(f"{row.case:{width}}  {row.metric:{names}} {row.value:10.3f} {row.unit:8}{limit}")
    if out is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        values = [{**asdict(row), "ratio": row.ratio} for row in rows]
        record = {"name": name, "commit": commit.stdout.strip(), "machine": machine(), "rows": values}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
