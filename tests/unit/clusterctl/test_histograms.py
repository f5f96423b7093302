"""Figures out of a scrape: sums over labels, quantiles between bounds, what came between two looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tandem.clusterctl.inspect.histograms import Scrape

BOUNDS = (0.1, 0.2, 0.5, 1.0)


def scrape(*observed: float, counted: int = 0) -> Scrape:
    """Return a scrape of a real registry."""
    registry = CollectorRegistry()
    histogram = Histogram("wait_seconds", "x", buckets=BOUNDS, registry=registry)
    counter = Counter("things_total", "x", ["kind"], registry=registry)
    for value in observed:
        histogram.observe(value)
    counter.labels("a").inc(counted)
    counter.labels('b="c",le="7"').inc(counted and 1)
    return Scrape.parse(generate_latest(registry).decode())


def test_counters_are_added_up_over_their_labels() -> None:
    assert scrape(counted=4).total("things_total") == 5
    assert scrape().total("no_such_total") == 0


def test_quantiles_lie_between_the_bounds() -> None:
    found = scrape(*[0.05] * 50, *[0.15] * 50)
    assert found.quantile("wait_seconds", 0.5) == pytest.approx(0.1)
    assert found.quantile("wait_seconds", 0.75) == pytest.approx(0.15)
    assert found.quantile("wait_seconds", 1.0) == pytest.approx(0.2)
    assert scrape(7.0).quantile("wait_seconds", 0.5) == 1.0, "beyond the last bound nothing is known"
    assert scrape().quantile("wait_seconds", 0.5) is None
    assert scrape().quantile("no_such_seconds", 0.5) is None


@given(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(observed: list[float], share: float) -> None:
    found = scrape(*observed).quantile("wait_seconds", share)
    assert found is not None
    true = sorted(observed)[max(0, -int(-share * len(observed) // 1) - 1)]
    upper = next(bound for bound in BOUNDS if true <= bound)
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < upper), default=0.0)
    assert lower <= found <= upper + 1e-9


def test_between_two_looks() -> None:
    before, now = scrape(0.05, 0.05, counted=3), scrape(0.05, 0.05, 0.15, counted=6)
    recent = now.since(before)
    assert recent.total("things_total") == 3
    assert recent.quantile("wait_seconds", 0.5) == pytest.approx(0.15)
    anew = scrape(0.15, counted=1).since(before)
    assert anew.total("things_total") == 2, "the router began anew"
