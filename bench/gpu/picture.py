"""One picture of a result file: each case's share of the device's limit. Made on any machine."""

from __future__ import annotations

import json
from pathlib import Path

from bench.report import Row, rows_in

_GROUPS = {"decode ": "decode attention", "extend ": "extend attention", "model ": "whole model", "": "all else"}
"""Prefixes of cases, and their panels."""
_SPEEDS = ("GB/s", "TFLOP/s", "tokens/s")


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
