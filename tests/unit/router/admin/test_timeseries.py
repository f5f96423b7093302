"""Curves of the last minutes: what was added in which slot, added over processes, and what is not known left open."""

from __future__ import annotations

import asyncio

import pytest

from tandem.router.admin.page.timeseries import SLOT_S, SLOTS, TimeSeries, added_up, curves, quantile
from tandem.router.metrics.router import Metrics


class Wall:
    def __init__(self) -> None:
        self.now_s = 1000 * SLOT_S

    def __call__(self) -> float:
        return self.now_s

    def next_slot(self) -> None:
        self.now_s += SLOT_S


def made() -> tuple[Metrics, Wall, TimeSeries]:
    metrics, wall = Metrics(list, lambda: 0), Wall()
    return metrics, wall, TimeSeries(metrics, wall)


def test_a_slot_has_what_was_added_in_it() -> None:
    metrics, wall, noted = made()
    for seconds in (0.1, 0.1, 0.1, 4.0):
        metrics.of("m").ttft.observe(seconds)
    metrics.of("m").generated_tokens.inc(50)
    metrics.of("m").prompt_tokens.inc(30)
    metrics.of("m").cached_tokens.inc(10)
    for outcome in ("met", "met", "missed", "cancelled"):
        metrics.slo("chat", outcome)
    for outcome in ("ok", "ok", "cancelled", "overloaded"):
        metrics.request_ended("chat", outcome)
    wall.next_slot()
    noted.note()
    wall.next_slot()
    noted.note()
    metrics.of("m").itl.observe(0.02)
    wall.next_slot()
    noted.note()
    shown = curves(noted.raw())
    first, second, third = shown["slots"]
    assert [slot["at_s"] for slot in shown["slots"]] == [1000 * SLOT_S, 1001 * SLOT_S, 1002 * SLOT_S]
    assert 0.08 < first["ttft_p50_s"] <= 0.1
    assert 2.0 < first["ttft_p99_s"] <= 5.0
    assert first["itl_p50_s"] is None
    assert (first["goodput_per_s"], first["kept"]) == (2 / SLOT_S, pytest.approx(2 / 3))
    assert (first["answers_per_s"], first["failed"]) == (4 / SLOT_S, 1)
    assert (first["output_tokens_per_s"], first["prompt_tokens_per_s"]) == (50 / SLOT_S, 30 / SLOT_S)
    assert (second["ttft_p50_s"], second["goodput_per_s"], second["answers_per_s"]) == (None, None, 0)
    assert 0.015 < third["itl_p99_s"] <= 0.02
    assert (shown["totals"]["prompt_tokens"], shown["totals"]["cached_tokens"]) == (30, 10)


def test_a_quarter_of_an_hour_is_kept() -> None:
    _, wall, noted = made()
    for _ in range(SLOTS + 5):
        wall.next_slot()
        noted.note()
    slots = noted.raw()["slots"]
    assert len(slots) == SLOTS
    assert slots[-1]["slot"] == 1000 + SLOTS + 4


def test_processes_are_added_slot_by_slot() -> None:
    raws = []
    for seconds, late in ((0.1, False), (4.0, False), (0.1, True)):
        metrics, wall, noted = made()
        if late:
            wall.next_slot()
        metrics.of("m").ttft.observe(seconds)
        metrics.of("m").prompt_tokens.inc(7)
        wall.next_slot()
        noted.note()
        raws.append(noted.raw())
    both, alone = added_up(raws)["slots"]
    assert (both["slot"], alone["slot"]) == (1000, 1001)
    assert both["counts"]["prompt_tokens"] == 14
    assert (both["ttft"]["0.1"], both["ttft"]["+Inf"]) == (1, 2)
    assert quantile(both["ttft"], 0.99) == pytest.approx(4.94)
    assert len(added_up([{"slots": [{**alone, "slot": number} for number in range(SLOTS + 9)]}])["slots"]) == SLOTS


def test_quantiles_lie_evenly_between_two_bounds() -> None:
    buckets = {"1.0": 0, "2.0": 10, "+Inf": 10}
    assert quantile(buckets, 0.5) == 1.5
    assert quantile({"1.0": 0, "2.0": 0, "+Inf": 3}, 0.5) == 2.0, "no more is known of what is above the last bound"
    assert quantile({}, 0.5) is None
    assert quantile({"1.0": 0, "+Inf": 0}, 0.5) is None


def test_slots_are_noted_as_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    _, wall, noted = made()
    wall.now_s += 1.5
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError
        wall.now_s += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(noted.run())
    assert pauses == [SLOT_S - 1.5, SLOT_S, SLOT_S]
    assert [slot["slot"] for slot in noted.raw()["slots"]] == [1000, 1001]
