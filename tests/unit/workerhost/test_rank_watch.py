"""A rank has stopped when the host has looked ten times in a row without seeing a new tick."""

from collections.abc import Iterator

import pytest

from tandem.workercore.heartbeat_page import Pulse
from tandem.workerhost.rank_watch import SILENT_LOOKS, WATCH_EVERY_S, RankWatch


@pytest.fixture
def pulses() -> Iterator[list[Pulse]]:
    pulses = [Pulse.create(f"test-{rank}") for rank in range(2)]
    yield pulses
    for pulse in pulses:
        pulse.close()


def test_only_the_silent_rank_is_named(pulses: list[Pulse]) -> None:
    watch = RankWatch(pulses)
    for look in range(1, 3 * SILENT_LOOKS):
        pulses[0].tick(float(look))
        assert watch.look() == ([1] if look >= SILENT_LOOKS else [])
    pulses[1].tick(99.0)
    assert watch.look() == []


def test_a_machine_that_was_suspended_is_no_false_alarm(pulses: list[Pulse]) -> None:
    """However far the clock jumps: it costs the one look that came before the ranks' next tick."""
    watch = RankWatch(pulses)
    for now_s in (1.0, 2.0, 100_000.0, 200_000.0):
        for pulse in pulses:
            pulse.tick(now_s)
        assert watch.look() == []
        assert watch.look() == []


def test_the_longest_step_is_named(pulses: list[Pulse]) -> None:
    watch = RankWatch(pulses)
    pulses[1].begin_step()
    for look in range(4):
        watch.look()
        assert watch.step_s()[1] == look * WATCH_EVERY_S
    pulses[0].begin_step()
    watch.look()
    assert watch.step_s() == (1, 4 * WATCH_EVERY_S)
    pulses[1].end_step()
    pulses[1].begin_step()  # another one
    watch.look()
    assert watch.step_s() == (0, WATCH_EVERY_S)
    for pulse in pulses:
        pulse.end_step()
    watch.look()
    assert watch.step_s()[1] == 0.0


def test_a_machine_that_was_suspended_inside_a_step_is_no_false_alarm(pulses: list[Pulse]) -> None:
    """Host and ranks are stopped for longer than any step may take, and go on together, the host first."""
    watch = RankWatch(pulses)
    pulses[0].tick(100.0)
    pulses[0].begin_step()
    watch.look()
    pulses[1].tick(100_000.0)  # the clock has gone on
    assert watch.look() == []
    assert watch.step_s() == (0, WATCH_EVERY_S)
