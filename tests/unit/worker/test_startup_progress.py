"""Compilers are a phase of their own, whichever phase they run in."""

from __future__ import annotations

from tandem.core.start_times import StartPhase
from tandem.worker.startup_progress import StartSteps


def test_a_compiler_interrupts_the_phase_that_needs_it() -> None:
    said: list[str] = []
    steps = StartSteps(said.append)
    steps.compile(True)
    steps.compile(False)
    steps.enter(StartPhase.POOL)
    steps.compile(True)
    steps.compile(False)
    steps.note("memory: 1 GiB")
    steps.enter(StartPhase.WARM_UP)
    compiling, pool = StartPhase.COMPILING, StartPhase.POOL
    assert said == [compiling, pool, compiling, pool, "memory: 1 GiB", StartPhase.WARM_UP]
