"""Rows of the comparison, with each peer's figure as a limit, and a picture of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.peers.systems import TANDEM
from bench.report import Row

_WIDTH = 0.8
"""Of the bars of one case, in all."""


def rows_of(case: str, medians: Mapping[str, Mapping[str, tuple[float, str]]]) -> Iterator[Row]:
    """Rows of a case: `medians` by system. Of a Tandem there is one for each peer, of a peer a plain one."""
    peers = [name for name in medians if name not in TANDEM]
    for name, found in medians.items():
        for metric, (value, unit) in found.items():
            if name in TANDEM and peers:
                for peer in peers:
                    limit = medians[peer][metric][0]
                    yield Row(case, f"{name}: {metric}, of {peer}'s", value, unit, limit)
            else:
                yield Row(case, f"{name}: {metric}", value, unit)


def merged(earlier: Sequence[Row], later: Sequence[Row]) -> list[Row]:
    """`earlier` rows of other cases, then `later` ones."""
    again = {row.case for row in later}
    return [*(row for row in earlier if row.case not in again), *later]


def values(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Format → metric with its unit → case → system → value."""
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for row in rows:
        weights, _, case = row.case.partition(": ")
        system, _, what = row.metric.partition(": ")
        metric = f"{what.partition(',')[0]}, {row.unit}"
        found.setdefault(weights, {}).setdefault(metric, {}).setdefault(case, {})[system] = row.value
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a line of panels for each format, a panel for each metric: a group of bars a case. Raises OSError."""
    from matplotlib.figure import Figure  # draws into files and needs no display

    panels = values(rows)
    across = max(map(len, panels.values()))
    systems = list(dict.fromkeys(row.metric.partition(": ")[0] for row in rows))
    figure = Figure(figsize=(6 * across, 4 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), across, squeeze=False)
    for line, (weights, metrics) in zip(grid, panels.items(), strict=True):
        for axes, (metric, cases) in zip(line, metrics.items(), strict=False):
            for place, system in enumerate(systems):
                bars = [(at, found[system]) for at, found in enumerate(cases.values()) if system in found]
                left = _WIDTH * (place / len(systems) - 0.5)
                heights = [height for _, height in bars]
                axes.bar([at + left for at, _ in bars], heights, _WIDTH / len(systems), align="edge", label=system,
                         color=f"C{place}")  # fmt: skip
            names = [case.removesuffix(" tokens").replace(", ", "\n") for case in cases]
            axes.set_xticks(range(len(cases)), names, fontsize=6)
            axes.set(yscale="log", title=f"{weights}: {metric}")
            axes.grid(axis="y", alpha=0.3)
    grid[0][0].legend(fontsize=8)
    figure.savefig(path)
