"""The result file of a run, written after every case so that a run can be broken off and taken up again."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Report:
    """Rows `{case, metric, value, unit, limit, ratio}` and the names of the cases that are done.

    For errors the limit is a tolerance and a ratio above 1 is a failure; for speeds it is what the device could do.
    """

    path: Path
    machine: dict[str, Any]
    commit: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, machine: dict[str, Any], *, commit: str | None, fresh: bool) -> Report:
        """Continue the file at `path` if it was made by this commit on this kind of machine."""
        report = cls(path=path, machine=machine, commit=commit or current_commit())
        if fresh or not path.exists():
            return report
        stored = json.loads(path.read_text())
        if stored.get("commit") == report.commit and stored.get("machine") == machine:
            report.rows, report.done = stored["rows"], stored.get("done", [])
        return report

    def add(self, case: str, metric: str, value: float, unit: str, limit: float | None = None) -> None:
        ratio = value / limit if limit else None
        row = {"case": case, "metric": metric, "value": value, "unit": unit, "limit": limit, "ratio": ratio}
        self.rows.append(row)
        print(format_row(row), flush=True)

    def finish(self, case: str) -> None:
        self.done.append(case)
        self.save()

    def save(self) -> None:
        content = {
            "name": "gpu",
            "commit": self.commit,
            "machine": self.machine,
            "device": self.machine["device"],
            "rows": self.rows,
            "done": self.done,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    def value(self, case: str, metric: str) -> float:
        """A value measured earlier in this run. Raises KeyError when it was not."""
        for row in self.rows:
            if row["case"] == case and row["metric"] == metric:
                return float(row["value"])
        raise KeyError(f"{case} {metric}")

    def failures(self) -> list[dict[str, Any]]:
        """Correctness rows past their tolerance; NaN counts."""
        return [row for row in self.rows if row["unit"] == "error" and not row["value"] <= row["limit"]]


def format_row(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None else f"{row['ratio']:8.1%} of {row['limit']:.4g}"
    return f"{row['case']:<58} {row['metric']:<22} {row['value']:>12.5g} {row['unit']:<10} {ratio}"


def current_commit() -> str:
    result = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
