"""Draws an import graph in rows of boxes, with arrows that go around boxes. Owns the layout; reads no imports.

After Sugiyama: an arrow that passes a row has a place of its own there, rows are ordered so that few arrows cross, and
boxes are moved to below what points at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve

if TYPE_CHECKING:
    from tools.import_graph import ImportGraph

ROW_HEIGHT, BOX_HEIGHT, LETTER, GAP, LANE, PORT = 1.3, 0.56, 0.115, 0.32, 0.2, 0.08
"""Sizes in inches: between two rows, of a box, of a letter, between boxes, between arrows that pass a row, between the
pale arrows of a box."""
COLOURS = ("#2b6cb0", "#b7472a", "#2f855a", "#805ad5", "#b7791f", "#0d7d86", "#c2417f", "#5a6b1f", "#4a5568")
"""Colours of boxes and the arrows that begin there, in turn."""
SWEEPS = 24
Arrow = tuple[str, str]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Passage:
    """Place where an arrow passes a row."""

    arrow: Arrow
    row: int


_Place = str | _Passage
_Links = Mapping[_Place, Sequence[_Place]]


def draw(graph: ImportGraph, out: Path) -> None:
    """Write the picture; the ending of `out` gives its form."""
    layout = _Layout(graph)
    left = min(x - layout.width(place) / 2 for place, (x, _) in layout.spots.items()) - GAP
    right = max(x + layout.width(place) / 2 for place, (x, _) in layout.spots.items()) + GAP
    top, bottom = 1.0, -ROW_HEIGHT * (len(graph.rows) - 1) - 0.75
    left, right = min(left, (left + right) / 2 - 3.5), max(right, (left + right) / 2 + 3.5)
    figure = Figure(figsize=(right - left, top - bottom))
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.axis("off")
    legend = "An arrow points at what is imported; it is pale where others lead there, too.\n"
    legend += "In a box: its modules. At an arrow: pairs of modules."
    axes.text((left + right) / 2, top - 0.2, graph.title, ha="center", va="center", fontsize=11, weight="bold")
    axes.text((left + right) / 2, top - 0.48, legend, ha="center", va="center", fontsize=8, color="#4a5568")
    names = [name for row in graph.rows for name in row]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    for arrow in sorted(graph.imports, key=lambda arrow: arrow not in layout.implied):
        _draw_arrow(axes, layout.line(arrow), colours[arrow[0]], 0 if arrow in layout.implied else graph.imports[arrow])
    for name in names:
        _draw_box(axes, name, layout.spots[name], layout.width(name), graph.sizes[name], colours[name])
    # Neither drawn letters nor chance nor a date: the same graph is the same, small file.
    with mpl.rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none"}):
        figure.savefig(out, dpi=110, metadata={"Date": None} if out.suffix == ".svg" else None)


class _Layout:
    """Positions of all parts: `spots`, and a `line` for each arrow."""

    def __init__(self, graph: ImportGraph) -> None:
        self.implied = graph.implied
        self._row_of = {name: number for number, row in enumerate(graph.rows) for name in row}
        self._chains = {arrow: self._chain(arrow) for arrow in graph.imports}
        self._above, self._below = self._links()
        self._widths = {name: self._room(name) for name in graph.sizes}
        rows: list[list[_Place]] = [list(row) for row in graph.rows]
        for chain in self._chains.values():
            for place in chain[1:-1]:
                rows[self._row(place)].append(place)
        self.spots = self._spots(_with_few_crossings(rows, self._above, self._below))
        self._ends = self._ports()

    def width(self, place: _Place) -> float:
        return self._widths[place] if isinstance(place, str) else 0.0

    def line(self, arrow: Arrow) -> list[Point]:
        """The points that an arrow goes through."""
        passages = self._chains[arrow][1:-1]
        return [self._ends[arrow, 0], *(self.spots[place] for place in passages), self._ends[arrow, 1]]

    def _chain(self, arrow: Arrow) -> list[_Place]:
        first, last = self._row_of[arrow[0]], self._row_of[arrow[1]]
        step = 1 if last > first else -1
        return [arrow[0], *(_Passage(arrow, row) for row in range(first + step, last, step) if first != last), arrow[1]]

    def _row(self, place: _Place) -> int:
        return place.row if isinstance(place, _Passage) else self._row_of[place]

    def _links(self) -> tuple[_Links, _Links]:
        """For each place, those that arrows lead to in the row above and in the one below."""
        above: dict[_Place, list[_Place]] = {}
        below: dict[_Place, list[_Place]] = {}
        for chain in self._chains.values():
            for pair in pairwise(chain):
                upper, lower = sorted(pair, key=self._row)
                if self._row(upper) != self._row(lower):
                    below.setdefault(upper, []).append(lower)
                    above.setdefault(lower, []).append(upper)
        return above, below

    def _weight(self, arrow: Arrow) -> int:
        """Width that an arrow takes of a box's edge."""
        return 1 if arrow in self.implied else 3

    def _room(self, name: str) -> float:
        leaving = sum(self._weight(arrow) for arrow in self._chains if arrow[0] == name)
        arriving = sum(self._weight(arrow) for arrow in self._chains if arrow[1] == name)
        return max(0.9, LETTER * (len(name) + 3), PORT * max(leaving, arriving))

    def _spots(self, rows: Sequence[Sequence[_Place]]) -> dict[_Place, Point]:
        """The centre of each place: near the mean of its neighbours, in the order of its row, without overlaps."""
        x: dict[_Place, float] = {}
        for row in rows:
            x |= dict(zip(row, self._apart(row, [0.0] * len(row)), strict=True))
        for sweep in range(2 * SWEEPS):
            for row in rows if sweep % 2 == 0 else reversed(rows):
                beside = [(*self._above.get(place, ()), *self._below.get(place, ())) for place in row]
                wished = [_mean([x[o] for o in others], x[p]) for p, others in zip(row, beside, strict=True)]
                x |= dict(zip(row, self._apart(row, wished), strict=True))
        return {place: (x[place], -ROW_HEIGHT * number) for number, row in enumerate(rows) for place in row}

    def _apart(self, row: Sequence[_Place], wished: Sequence[float]) -> list[float]:
        """Places as near to the wanted ones as their order and widths allow: neighbours that collide share their
        mean."""
        offsets, at = [0.0], 0.0
        for one, other in pairwise(row):
            are_lanes = isinstance(one, _Passage) and isinstance(other, _Passage)
            at += LANE if are_lanes else (self.width(one) + self.width(other)) / 2 + GAP
            offsets.append(at)
        blocks: list[tuple[float, int]] = []
        for wish, offset in zip(wished, offsets, strict=True):
            mean, count = wish - offset, 1
            while blocks and blocks[-1][0] > mean:
                other_mean, more = blocks.pop()
                mean, count = (mean * count + other_mean * more) / (count + more), count + more
            blocks.append((mean, count))
        starts = [mean for mean, count in blocks for _ in range(count)]
        return [start + offset for start, offset in zip(starts, offsets, strict=True)]

    def _ports(self) -> dict[tuple[Arrow, int], Point]:
        """Where each arrow leaves a box (0) and arrives at one (1): side by side, in the order in which they come."""
        sides: dict[tuple[str, int], list[tuple[float, Arrow, int]]] = {}
        for arrow, chain in self._chains.items():
            for end, beside in ((0, chain[1]), (1, chain[-2])):
                is_above = self.spots[beside][1] > self.spots[arrow[end]][1]  # those of one row are joined below it
                sides.setdefault((arrow[end], 1 if is_above else -1), []).append((self.spots[beside][0], arrow, end))
        found = {}
        for (name, side), arrows in sides.items():
            x, y = self.spots[name]
            unit = (self.width(name) - 0.2) / sum(self._weight(arrow) for _, arrow, _ in arrows)
            at = x - self.width(name) / 2 + 0.1
            for _, arrow, end in sorted(arrows):
                found[arrow, end] = at + unit * self._weight(arrow) / 2, y + side * BOX_HEIGHT / 2
                at += unit * self._weight(arrow)
        return found


def _with_few_crossings(rows: list[list[_Place]], above: _Links, below: _Links) -> list[list[_Place]]:
    """The rows, each in the order of what it is joined to in the row before, down and up again."""
    best, fewest = [list(row) for row in rows], _crossings(rows, below)
    for sweep in range(SWEEPS):
        is_down = sweep % 2 == 0
        for number in range(1, len(rows)) if is_down else range(len(rows) - 2, -1, -1):
            fixed = {place: at for at, place in enumerate(rows[number - 1 if is_down else number + 1])}
            beside = above if is_down else below
            wished = {p: _mean([fixed[o] for o in beside.get(p, ())], at) for at, p in enumerate(rows[number])}
            rows[number].sort(key=wished.__getitem__)
        if (crossings := _crossings(rows, below)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _crossings(rows: Sequence[Sequence[_Place]], below: _Links) -> int:
    """Pairs of arrows between two rows that cross."""
    count = 0
    for upper, lower in pairwise(rows):
        at = {place: number for number, place in enumerate(lower)}
        arrows = [(start, at[other]) for start, place in enumerate(upper) for other in below.get(place, ())]
        count += sum(a[0] < b[0] and a[1] > b[1] for a in arrows for b in arrows)
    return count


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _draw_arrow(axes: Any, points: Sequence[Point], colour: str, count: int) -> None:
    """A smooth line, upright at each point; pale and without a number if `count` is 0."""
    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = (to_y - y) / 2
        first, second = (y + bend, to_y - bend) if bend else (y - ROW_HEIGHT / 3, y - ROW_HEIGHT / 3)
        vertices += [(x, first), (to_x, second), (to_x, to_y)]
        codes += [Curve.CURVE4] * 3
    axes.add_patch(
        FancyArrowPatch(
            path=Curve(vertices, codes), arrowstyle="-|>", mutation_scale=11 if count else 7, color=colour,
            shrinkA=0, shrinkB=0, alpha=0.95 if count else 0.25, linewidth=1.5 if count else 0.8,
        )
    )  # fmt: skip
    if count:
        (from_x, _), (x, y) = points[-2:]
        up, side, align = 0.17 if vertices[-2][1] > y else -0.17, *((-0.06, "right") if from_x > x else (0.06, "left"))
        axes.text(x + side, y + up, str(count), fontsize=7, color=colour, ha=align, va="center")


def _draw_box(axes: Any, name: str, spot: Point, width: float, modules: int, colour: str) -> None:
    x, y = spot
    corner = x - width / 2 + 0.06, y - BOX_HEIGHT / 2 + 0.06
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": colour, "linewidth": 1.4}
    axes.add_patch(FancyBboxPatch(corner, width - 0.12, BOX_HEIGHT - 0.12, boxstyle="round,pad=0.06", **style))
    axes.text(x, y + 0.08, name, ha="center", va="center", fontsize=10, color=colour, weight="bold")
    axes.text(x, y - 0.14, str(modules), ha="center", va="center", fontsize=7, color="#4a5568")
