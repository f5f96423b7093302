"""When what died is started again."""

from __future__ import annotations

from tandem.core.backoff import RestartBackoff
from tandem.core.clock import ManualClock


def test_delays_grow_while_it_keeps_dying_however_well_each_start_went() -> None:
    clock = ManualClock()
    backoff = RestartBackoff(clock)
    delays_s = []
    for _ in range(7):
        backoff.ready()
        clock.advance(29.9)
        delays_s.append(backoff.died())
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_they_begin_again_once_it_ran_well() -> None:
    clock = ManualClock()
    backoff = RestartBackoff(clock)
    assert [backoff.died(), backoff.died()] == [0.5, 1.0]
    backoff.ready()
    clock.advance(30.0)
    assert backoff.died() == 0.5
    clock.advance(60.0)
    assert backoff.died() == 1.0, "it was not ready in between"
