"""Number of running batch requests: none while a client waits, ever more in a gap; and which clients count."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lifecycle import RoleName
from tandem.router.storage.batches.throttle import GRACE_S, GROW_S, YIELD_S, Pace, waiting


def test_it_grows_in_a_gap_up_to_the_limit() -> None:
    pace, now_s = Pace(3), 0.0
    allowed: list[int] = []
    for _ in range(30):
        allowed.append(pace.look(now_s, 0, allowed[-1] if allowed else 0))
        now_s += 0.1
    assert allowed[0] == 1
    assert allowed[-1] == 3
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(allowed))


def test_it_does_not_grow_beyond_what_is_used() -> None:
    pace = Pace(8)
    for look in range(100):
        assert pace.look(look * GROW_S, 0, 0) == 1


def test_who_waits_stops_new_ones_at_once_and_running_ones_in_time() -> None:
    pace = Pace(4)
    now_s = 0.0
    for _ in range(10):
        pace.look(now_s, 0, 4)
        now_s += GROW_S
    assert pace.look(now_s, 0, 4) == 4
    assert pace.look(now_s, 1, 3) == 3  # one has ended; its place is not filled
    assert pace.look(now_s + YIELD_S / 2, 1, 3) == 3
    for step in range(1, 4):
        assert pace.look(now_s + step * YIELD_S, 1, 4 - step) == 3 - step
    assert pace.look(now_s + 9 * YIELD_S, 5, 0) == 0
    assert pace.look(now_s + 9 * YIELD_S + 0.1, 0, 0) == 1  # the gap: from one on again


@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=60))
def test_bounds(limit: int, looks: list[tuple[float, int]]) -> None:
    """Never more than the limit; while a client waits never more than run; never stuck at none in a gap."""
    pace, running, now_s = Pace(limit), 0, 0.0
    for pause_s, waits in looks:
        now_s += pause_s
        allowed = pace.look(now_s, waits, running)
        assert 0 <= allowed <= limit
        assert allowed <= running if waits else allowed >= 1
        running = allowed


@dataclass
class _Flight:
    started_s: float
    prefill: str | None
    decode: str
    is_background: bool = False
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    plan: Any = field(init=False)

    def __post_init__(self) -> None:
        self.plan = SimpleNamespace(prefill=self.prefill, decode=self.decode)


def link(worker: str, queued: int, role: RoleName = RoleName.PREFILL) -> Any:
    facts, load = SimpleNamespace(role=role), SimpleNamespace(queued_requests=queued)
    return SimpleNamespace(worker=worker, facts=facts, load=load)


def count(flights: list[_Flight], links: list[Any], now_s: float = 100.0) -> int:
    return waiting(cast(Any, flights), links, now_s)


def test_who_waits() -> None:
    old, young = 100.0 - 2 * GRACE_S, 100.0 - GRACE_S / 2
    assert count([_Flight(old, "p", "d"), _Flight(old, None, "d")], []) == 2
    assert count([_Flight(young, "p", "d")], []) == 0
    assert count([_Flight(old, "p", "d", prefill_started_s=99.9)], []) == 0
    assert count([_Flight(old, "p", "d", first_token_s=99.9)], []) == 0
    assert count([_Flight(old, "p", "d", is_background=True)], []) == 0


def test_what_other_routers_have_waiting_is_told_from_our_own() -> None:
    ours = [_Flight(0.0, "p", "d", is_background=True), _Flight(0.0, None, "m", is_background=True)]
    assert count(ours, [link("p", 1), link("m", 1, RoleName.MIXED)]) == 0
    assert count(ours, [link("p", 3), link("m", 1, RoleName.MIXED)]) == 2
    assert count(ours, [link("d", 9, RoleName.DECODE)]) == 0
    down = SimpleNamespace(worker="x", facts=None, load=SimpleNamespace(queued_requests=5))
    assert count([], [down]) == 0
