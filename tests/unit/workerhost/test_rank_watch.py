"""A rank has stopped when the host has looked ten times in a row without seeing a new tick."""

from collections.abc import Iterator

import pytest

from tandem.workerhost.pulse import Pulse
from tandem.workerhost.rank_watch import SILENT_LOOKS, RankWatch


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
    assert watch.step_s(10.0)[1] == 0.0
    pulses[1].begin_step(4.0)
    assert watch.step_s(10.0) == (1, 6.0)
    pulses[0].begin_step(1.0)
    assert watch.step_s(10.0) == (0, 9.0)
    pulses[0].end_step()
    assert watch.step_s(10.0) == (1, 6.0)


class EndingPulse(Pulse):
    """Whose step ends as soon as somebody has looked at it."""

    @property
    def step_started_s(self) -> float:
        started_s = super().step_started_s
        self.end_step()
        return started_s


def test_a_step_that_ends_during_the_look_is_no_step_since_the_boot() -> None:
    pulse = EndingPulse.create("test-ending")
    pulse.begin_step(7000.0)
    assert RankWatch([pulse]).step_s(7001.0) == (0, 1.0)
    assert RankWatch([pulse]).step_s(7001.0) == (0, 0.0)
    pulse.close()
