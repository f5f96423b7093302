"""Load reports: every 100 ms, between steps, the latest at any moment."""

from __future__ import annotations

from tandem.controlplane.simulator.reports import Reports, SimulatedLoad


def _at(reports: Reports, moment_s: float) -> int:
    return reports.seen(moment_s)[1].queued_tokens


def _turn(reports: Reports, now_s: float, tokens: int, *, is_stepping: bool) -> None:
    reports.turn(now_s, lambda: SimulatedLoad(queued_tokens=tokens), is_stepping=is_stepping)


def test_a_busy_worker_reports_at_the_end_of_a_step() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=True)
    _turn(reports, 1.05, 20, is_stepping=True)  # too soon, and then it computes
    _turn(reports, 1.3, 30, is_stepping=True)
    assert [_at(reports, s) for s in (0.99, 1.0, 1.2, 1.29, 1.3, 9.0)] == [0, 10, 10, 10, 30, 30]


def test_an_idle_worker_says_a_little_later_what_was_too_soon() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=False)
    _turn(reports, 1.04, 20, is_stepping=False)
    assert [_at(reports, s) for s in (1.05, 1.09, 1.11)] == [10, 10, 20]


def test_what_was_not_yet_sent_is_replaced() -> None:
    reports = Reports(SimulatedLoad())
    _turn(reports, 1.0, 10, is_stepping=False)
    _turn(reports, 1.04, 20, is_stepping=False)
    _turn(reports, 1.06, 30, is_stepping=True)
    _turn(reports, 1.5, 40, is_stepping=True)
    assert [_at(reports, s) for s in (1.2, 1.49, 1.5)] == [10, 10, 40]


def test_in_a_stretch_of_equal_steps_reports_go_on() -> None:
    reports = Reports(SimulatedLoad())
    reports.turn(1.0, lambda: SimulatedLoad(queued_tokens=7), is_stepping=True, is_stretching=True)
    sent_s, load = reports.seen(1.56)
    assert (round(sent_s, 9), load.queued_tokens) == (1.5, 7)
