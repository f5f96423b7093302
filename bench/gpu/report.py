"""The result file of a run, written after every case so that a stopped run can continue; and its picture, each case's
share of the device's limit, made on any machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import Row, rows_in, write
from bench.report import commit as current_commit

_GROUPS = {"decode ": "decode attention", "extend ": "extend attention", "model ": "whole model", "": "all else"}
"""Prefixes of cases, and their panels."""
_SPEEDS = ("GB/s", "TFLOP/s", "tokens/s")


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


Case = tuple[str, Callable[[Report], None]]
"""The name of a case, and its body."""


def draw(result: Path, picture: Path) -> int:
    """Draw every speed that has a limit; the format is the suffix of `picture`. Returns their number.

    Raises ValueError for a result without any: where there was no device nothing is claimed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = json.loads(result.read_text())
    groups: dict[str, list[Row]] = {}
    for row in rows_in(record):
        if row.unit in _SPEEDS and row.ratio is not None:
            title = next(title for start, title in _GROUPS.items() if row.case.startswith(start))
            groups.setdefault(title, []).append(row)
    if not groups:
        raise ValueError(f"{result} has no speeds to draw: device {record.get('device')}")
    most = max(map(len, groups.values()))
    figure = Figure(figsize=(7 * len(groups), 1 + 0.2 * most), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (title, rows) in zip(axes, groups.items(), strict=True):
        names = [f"{row.case}, {row.metric}" for row in rows]
        axis.barh(range(len(rows)), [100 * (row.ratio or 0.0) for row in rows], color="tab:blue")
        axis.set_yticks(range(len(rows)), names, fontsize=6)
        axis.invert_yaxis()
        axis.axvline(100, color="tab:red", linewidth=0.8)
        axis.set_xlabel("% of what the device could do")
        axis.set_title(title)
    figure.suptitle(f"{record['device']}, commit {record['commit']}")
    figure.savefig(picture)
    return sum(map(len, groups.values()))


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:8.1%} of {row.limit:.4g}"
    return f"{row.case:<58} {row.metric:<22} {row.value:>12.5g} {row.unit:<10} {ratio}"
