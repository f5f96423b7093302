"""The event core: order, ties, time that never goes back."""

from __future__ import annotations

import pytest

from tandem.controlplane.simulator.events import EventQueue


def test_events_run_by_time_and_ties_in_the_order_they_were_made() -> None:
    events, seen = EventQueue(), []
    for name, when_s in (("late", 2.0), ("first", 1.0), ("second", 1.0), ("third", 1.0)):
        events.at(when_s, lambda name=name: seen.append((name, events.now_s())))  # type: ignore[misc]
    events.run()
    assert seen == [("first", 1.0), ("second", 1.0), ("third", 1.0), ("late", 2.0)]


def test_what_an_event_brings_about_runs_too() -> None:
    events, seen = EventQueue(), []

    def again() -> None:
        seen.append(events.now_s())
        if len(seen) < 3:
            events.after(0.5, again)

    events.after(0.5, again)
    events.run()
    assert seen == [0.5, 1.0, 1.5]


def test_it_stops_where_it_is_told_to() -> None:
    events, seen = EventQueue(), []
    for when_s in (1.0, 2.0, 3.0):
        events.at(when_s, lambda: seen.append(events.now_s()))
    events.run(until_s=2.0)
    assert seen == [1.0, 2.0]
    events.run()
    assert seen == [1.0, 2.0, 3.0]


def test_nothing_happens_in_the_past() -> None:
    events = EventQueue(5.0)
    with pytest.raises(ValueError, match="an event at 4"):
        events.at(4.0, lambda: None)
