"""The map's proof: a slice of its runs, and its criteria for a failure."""

import dataclasses
import json
from typing import Any

import pytest

from proof.map.__main__ import AXES, NEAR, broken, label, play, point_of
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.sweep import MIXED, WAYS, Axes, MapPoint, places

SMALL = Axes(workers=3, requests=60)


@pytest.mark.parametrize("link_bytes_per_s", [1e9, 20e9])
def test_conditional_disaggregation_is_near_the_best_at_points_of_the_slice(link_bytes_per_s: float) -> None:
    """On slow links mixed workers are the best, on fast ones pairs."""
    entry = play(MapPoint(link_bytes_per_s, 0.7, 4096, 32), Calibration(), SMALL)
    others = {way: share for way, share in entry["by_way"].items() if way != "auto"}
    assert max(others, key=lambda way: others[way]) == (MIXED if link_bytes_per_s < 2e9 else "always")
    assert entry["nearness"] >= NEAR
    assert broken({"a point": entry}) == []


def test_every_place_has_a_label_of_its_own_and_an_entry_is_a_point_again() -> None:
    every = places(AXES)
    assert len({label(place) for place in every}) == len(every) == 64
    entry = json.loads(json.dumps(play(MapPoint(1e9, 0.4, 256, 16), Calibration(), Axes(workers=2, requests=5))))
    point = point_of(entry)
    assert set(point.by_way) == set(WAYS)
    assert point.by_split[MIXED] == {"2M": point.by_way[MIXED]}
    assert round(point.nearness, 4) == entry["nearness"]
    assert dataclasses.asdict(point) == {key: value for key, value in entry.items() if key != "nearness"}


def entry(**shares: float) -> dict[str, Any]:
    return {"by_way": shares, "nearness": shares["auto"] / max(share for way, share in shares.items() if way != "auto")}


def test_what_breaks_the_promise() -> None:
    near, far = entry(auto=0.95, always=0.2, never=1.0, mixed=0.9), entry(auto=0.5, always=0.2, never=0.4, mixed=0.6)
    assert broken({"near": near, "far": far}) == ["far: auto 50.0%, mixed 60.0%"]
