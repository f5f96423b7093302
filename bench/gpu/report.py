"""The result file of a run, written after every case so that a stopped run can continue."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import Row, rows_in, write
from bench.report import commit as current_commit


@dataclass(slots=True)
class Report:
    """Rows and the names of the cases that are done. `device`: names and versions, the device's own as `device`.

    For errors the limit is a tolerance and a ratio above 1 is a failure; for speeds it is the device's.
    """

    path: Path
    device: dict[str, Any]
    commit: str
    rows: list[Row] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, device: dict[str, Any], *, commit: str | None, fresh: bool) -> Report:
        """Continue the file at `path` if it was made by this commit on this kind of device."""
        report = cls(path=path, device=device, commit=commit or current_commit() or "unknown")
        if fresh or not path.exists():
            return report
        stored = json.loads(path.read_text())
        if all(stored.get(key) == value for key, value in {"commit": report.commit, **device}.items()):
            report.rows, report.done = rows_in(stored), stored.get("done", [])
        return report

    def add(self, case: str, metric: str, value: float, unit: str, limit: float | None = None) -> None:
        row = Row(case, metric, value, unit, limit)
        self.rows.append(row)
        print(_line(row), flush=True)

    def finish(self, case: str) -> None:
        self.done.append(case)
        self.save()

    def save(self) -> None:
        write("gpu", self.rows, self.path, commit=self.commit, **self.device, done=self.done)

    def value(self, case: str, metric: str) -> float:
        """A value measured earlier in this run. Raises KeyError when it was not."""
        for row in self.rows:
            if (row.case, row.metric) == (case, metric):
                return row.value
        raise KeyError(f"{case} {metric}")

    def failures(self) -> list[Row]:
        """Correctness rows past their tolerance; NaN counts."""
        return [row for row in self.rows if row.unit == "error" and not row.value <= (row.limit or 0.0)]


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:8.1%} of {row.limit:.4g}"
    return f"{row.case:<58} {row.metric:<22} {row.value:>12.5g} {row.unit:<10} {ratio}"
