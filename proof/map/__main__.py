"""Conditional disaggregation against always, never and all mixed, at every point of a map, on virtual time.

The map is prompt length × answer length × load × link. Promised: at every point `auto` has at least 95 % of what the
best of the other ways has, of all requests those that keep their promises. Finished points are kept in --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proof.record import Record, arguments_of
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.plots import of_map
from tandem.controlplane.simulator.sweep import Axes, MapPoint, Point, places, point_at
from tandem.core.config import SloSection
from tandem.core.errors import ConfigError

AXES = Axes()
PROMISE = SloSection(ttft_s=2.0, itl_s=0.05)
NEAR = 0.95
"""Least part of the best other way's result."""


def main() -> int:
    arguments = _arguments()
    calibration = Calibration()
    about = {
        "calibration": calibration.name,
        "axes": dataclasses.asdict(AXES),
        "promised": {"ttft_s": PROMISE.ttft_s, "itl_s": PROMISE.itl_s},
    }
    record = Record(arguments.out, "map", about, is_fresh=arguments.fresh)
    done: dict[str, dict[str, Any]] = record.content.setdefault("points", {})
    every, started_s = places(AXES), time.monotonic()
    for place in every:
        if label(place) in done:
            continue
        if arguments.seconds and time.monotonic() - started_s > arguments.seconds:
            break
        entry = done[label(place)] = play(place, calibration)
        record.save()
        shares = ", ".join(f"{way} {share:.1%}" for way, share in entry["by_way"].items())
        print(f"{label(place):44} {shares}; {entry['nearness']:.3f} of the best", flush=True)
    left = [place for place in every if label(place) not in done]
    found = broken(done)
    for promise in found:
        print(f"broken: {promise}")
    if arguments.picture is not None and not left:
        try:
            of_map([point_of(entry) for entry in done.values()], f"{AXES.workers} workers", arguments.picture)
        except ConfigError as error:
            print(f"proof.map: {error}", file=sys.stderr)
            return 2
    return record.verdict(len(done), left=len(left), broken=len(found))


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


def _arguments() -> argparse.Namespace:
    parser = arguments_of("map", __doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no point after so many; 0 = play all")
    parser.add_argument("--picture", type=Path, help="draw the map there, once all points are on record")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
