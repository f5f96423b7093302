"""Many clusters together: goodput over splits, the map of when not to disaggregate, and their pictures."""

import dataclasses
from pathlib import Path

import pytest

from tandem.controlplane.planner.records import RoleSplit
from tandem.controlplane.simulator import plots
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.sweep import (
    MIXED,
    WAYS,
    Axes,
    Point,
    SplitRow,
    most_per_s,
    over_splits,
    when_to_disaggregate,
)
from tandem.controlplane.simulator.workloads import varied
from tandem.core.config import SloSection

SLOW = dataclasses.replace(Calibration(), prefill_token_s=4e-4, decode_step_s=0.02, decode_sequence_s=0.001)
PROMISE = SloSection(ttft_s=2.0, itl_s=0.05)


@pytest.fixture(scope="module")
def rows() -> list[SplitRow]:
    trace = varied(requests=200, rate=4.0, prompt_tokens=2000, output_tokens=20, seed=1)
    return over_splits(SLOW, trace, 4, PROMISE)


def test_every_split_is_played_and_long_prompts_want_prefill_workers(rows: list[SplitRow]) -> None:
    assert [row.split for row in rows] == [RoleSplit(1, 3), RoleSplit(2, 2), RoleSplit(3, 1), RoleSplit(0, 0, 4)]
    by_split = {str(row.split): row for row in rows}
    assert by_split["3P:1D"].goodput_per_s > by_split["1P:3D"].goodput_per_s
    for row in rows:
        assert row.goodput_per_s == pytest.approx(row.attained * 4.0, rel=0.15)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    axes = Axes(
        prompts=(200, 3000), outputs=(10, 200), loads=(0.7,), links_bytes_per_s=(2e8, 2e10), workers=3, requests=60
    )
    return when_to_disaggregate(SLOW, axes, PROMISE)


@pytest.mark.slow
def test_the_map_has_every_point_once_with_every_way(points: list[Point]) -> None:
    assert len(points) == 8
    assert len({(p.prompt_tokens, p.output_tokens, p.link_bytes_per_s) for p in points}) == 8
    for point in points:
        assert set(point.by_way) == set(WAYS)
        assert all(0.0 <= share <= 1.0 for share in point.by_way.values())
        assert point.gain == point.by_way["always"] - point.by_way[MIXED]
        assert point.splits[MIXED] == "3M"


@pytest.mark.slow
def test_a_slow_link_makes_pairs_no_better(points: list[Point]) -> None:
    def always(link: float) -> float:
        return sum(point.by_way["always"] for point in points if point.link_bytes_per_s == link)

    assert always(2e8) <= always(2e10)


def test_most_per_s_falls_with_every_length() -> None:
    assert most_per_s(SLOW, 1000, 100, 0.05) > most_per_s(SLOW, 2000, 100, 0.05) > most_per_s(SLOW, 2000, 300, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_pictures_are_written(tmp_path: Path, rows: list[SplitRow], points: list[Point], ending: str) -> None:
    head = {".svg": b"<?xml", ".png": b"\x89PNG"}[ending]
    plots.of_splits(rows, "a title", tmp_path / f"splits{ending}")
    plots.of_map(points, "a title", tmp_path / f"map{ending}")
    for name in ("splits", "map"):
        content = (tmp_path / f"{name}{ending}").read_bytes()
        assert content.startswith(head)
        assert len(content) > 5000


def test_made_up_requests_have_the_mean_lengths_that_were_asked_for() -> None:
    trace = varied(requests=4000, rate=7.0, prompt_tokens=900, output_tokens=90, seed=3)
    assert trace.rate == pytest.approx(7.0, rel=0.05)
    assert sum(r.prompt_tokens for r in trace.requests) / 4000 == pytest.approx(900, rel=0.05)
    assert sum(r.output_tokens for r in trace.requests) / 4000 == pytest.approx(90, rel=0.05)
