"""Plots of sweeps, by matplotlib without a display; the ending of the name gives the format (.svg, .png, .pdf)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.controlplane.simulator.sweep import MIXED, Point, SplitRow
from tandem.core.errors import ConfigError


def of_splits(rows: Sequence[SplitRow], title: str, path: Path) -> None:
    """Plot goodput as bars, one a split, with the share that keeps its promises above each."""
    figure, (axis,) = _figure(1, 1, 1.2 * len(rows) + 2, 4)
    names = [str(row.split) for row in rows]
    bars = axis.bar(
        names, [row.goodput_per_s for row in rows], color=["#8c8c8c" if r.split.mixed else "#3b75af" for r in rows]
    )
    axis.bar_label(bars, [f"{row.attained:.0%}" for row in rows])
    axis.set_ylabel("requests a second that keep their promises")
    axis.set_title(title, fontsize=10)
    _save(figure, path)


def of_map(points: Sequence[Point], title: str, path: Path) -> None:
    """Plot a field for each load and link: prompts upwards, answers to the right, coloured by a split's gain."""
    loads = sorted({point.load for point in points})
    links = sorted({point.link_bytes_per_s for point in points})
    prompts, outputs = (
        sorted({getattr(point, name) for point in points}) for name in ("prompt_tokens", "output_tokens")
    )
    figure, axes = _figure(len(loads), len(links), 4.2 * len(links) + 1.5, 3.4 * len(loads) + 0.8)
    at = {(p.load, p.link_bytes_per_s, p.prompt_tokens, p.output_tokens): p for p in points}
    image: Any = None
    for axis, (load, link) in zip(axes, [(load, link) for load in loads for link in links], strict=True):
        cells = [[at[load, link, prompt, output] for output in outputs] for prompt in prompts]
        image = axis.imshow(
            [[point.gain for point in row] for row in cells],
            origin="lower",
            cmap="RdBu",
            vmin=-1,
            vmax=1,
            aspect="auto",
        )
        for y, row in enumerate(cells):
            for x, point in enumerate(row):
                best = max(point.by_way, key=lambda way: (round(point.by_way[way], 2), way == "auto"))
                axis.text(x, y, f"{point.gain:+.0%}\n{best}", ha="center", va="center", fontsize=7)
        axis.set_xticks(range(len(outputs)), [str(output) for output in outputs])
        axis.set_yticks(range(len(prompts)), [str(prompt) for prompt in prompts])
        axis.set_xlabel("answer, tokens")
        axis.set_ylabel("prompt, tokens")
        axis.set_title(f"{load:.0%} load, {link / 1e9:g} GB/s", fontsize=9)
    figure.suptitle(f"{title}: what the best split gains over {MIXED} workers", fontsize=10)
    figure.colorbar(image, ax=axes, label="share of all requests")
    _save(figure, path)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written", why=error.strerror or str(error)) from error
