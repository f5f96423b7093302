"""Phases of a start follow one another: together they are all of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tandem.core.clock import ManualClock, MonotonicClock
from tandem.core.start_times import StartPhase, StartTimes, process_started_s

PROGRAM = """
import time
time.sleep({pause})
from tandem.core.clock import MonotonicClock
from tandem.core.start_times import process_started_s
clock = MonotonicClock()
print(clock.now_s() - process_started_s(clock))
"""


def test_phases_add_up_from_the_start_of_the_process() -> None:
    clock = ManualClock(100.0)
    times = StartTimes(StartPhase.IMPORTS, clock, began_s=99.25)
    times.enter(StartPhase.CONFIG)
    clock.advance(0.002)
    times.enter(StartPhase.WEIGHTS)
    clock.advance(2.0)
    times.enter(StartPhase.WARM_UP)
    clock.advance(0.5)
    times.enter(StartPhase.WEIGHTS)  # once more
    clock.advance(1.0)
    assert times.fields() == {"took_s": 4.252, "imports_s": 0.75, "config_s": 0.002, "weights_s": 3.0, "warm_up_s": 0.5}
    assert times.words() == "started in 4.25 s: loading the model 3.00 s, importing Tandem 0.75 s, warming up 0.50 s"


def test_every_phase_is_told_by_words_that_nobody_else_says() -> None:
    assert len(set(StartPhase)) == len(StartPhase.__members__)


@pytest.mark.slow
def test_a_process_knows_when_it_was_started() -> None:
    """Not only since when its code runs."""
    began_s = time.monotonic()
    program = [sys.executable, "-c", PROGRAM.format(pause=0.3)]
    said_s = float(subprocess.run(program, capture_output=True, text=True, check=True, env=os.environ).stdout)
    assert 0.3 <= said_s <= time.monotonic() - began_s + 0.02  # it is reported in hundredths


def test_this_process_began_before_now() -> None:
    clock = MonotonicClock()
    assert 0.0 < clock.now_s() - process_started_s(clock) < 3600.0
