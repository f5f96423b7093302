"""Points of the map's proof: how one is played, the form of its entry in the results, and the check of the promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.sweep import Axes, MapPoint, Point, point_at
from tandem.core.config import SloSection

AXES = Axes()
PROMISE = SloSection(ttft_s=2.0, itl_s=0.05)
NEAR = 0.95
"""Least part of the best other way's result."""


def label(place: MapPoint) -> str:
    """A point's name in the results."""
    link, load, prompt, output = place
    return f"{prompt} + {output} tokens, {load:.0%} load, {link / 1e9:g} GB/s"


def play(place: MapPoint, calibration: Calibration, axes: Axes = AXES) -> dict[str, Any]:
    """Every way, on every split of the workers."""
    point = point_at(place, calibration, axes, PROMISE)
    return {**_rounded(dataclasses.asdict(point)), "nearness": round(point.nearness, 4)}


def point_of(entry: Mapping[str, Any]) -> Point:
    """The point of an entry of the results."""
    return Point(**{field.name: entry[field.name] for field in dataclasses.fields(Point)})


def broken(done: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """Points where `auto` is too far from the best of the others, in words."""
    found = []
    for name, entry in done.items():
        if entry["nearness"] < NEAR:
            others = {way: share for way, share in entry["by_way"].items() if way != "auto"}
            best = max(others, key=lambda way: others[way])
            found.append(f"{name}: auto {entry['by_way']['auto']:.1%}, {best} {others[best]:.1%}")
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value
