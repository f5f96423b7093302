"""Counts that fade, bounded."""

from __future__ import annotations

import pytest

from tandem.core.clock import ManualClock
from tandem.router.routing.prefix_popularity import LASTING_S, Popularity


def test_a_steady_rate_is_counted_and_fades() -> None:
    clock = ManualClock()
    popularity = Popularity(clock)
    for _ in range(4000):
        popularity.count(b"system")
        clock.advance(0.1)
    assert popularity.followers(b"system") == pytest.approx(10 * LASTING_S, rel=0.01)
    clock.advance(LASTING_S)
    assert popularity.followers(b"system") == pytest.approx(10 * LASTING_S / 2.71828, rel=0.01)
    assert popularity.followers(b"another") == 0.0


def test_nothing_held_is_not_counted() -> None:
    popularity = Popularity(ManualClock())
    popularity.count(b"")
    assert len(popularity) == 0


def test_the_least_recent_prefix_goes_first() -> None:
    popularity = Popularity(ManualClock(), max_prefixes=2)
    for prefix in (b"a", b"b", b"a", b"c"):
        popularity.count(prefix)
    assert [popularity.followers(prefix) for prefix in (b"a", b"b", b"c")] == [2.0, 0.0, 1.0]
