"""Test the phases of a start and the warm-up."""

import dataclasses
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import StartupError
from tandem.core.kv_compatibility import Fingerprint
from tandem.core.start_times import StartPhase
from tandem.engine.engine import Engine
from tandem.engine.sim.runner import SimRunner
from tandem.worker.builder import StartSteps
from tandem.worker.engine_loading import Loaded
from tests.unit.engine.arithmetic import make_request, tokens
from tests.unit.engine.simulation import layout


class ColdRunner(SimRunner):
    """A runner with a first step of a second and a half."""

    clock = ManualClock()

    def step(self, *args: Any, **options: Any) -> Any:
        self.clock.advance(1.5)
        return super().step(*args, **options)


class BrokenRunner(SimRunner):
    def step(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")


def loaded(kind: type[SimRunner]) -> Loaded:
    runner = kind(layout(), [64], vocab_size=100, max_model_len=512)
    nobody = Fingerprint(**{field.name: "" for field in dataclasses.fields(Fingerprint)})
    return Loaded(Engine(runner, clock=ColdRunner.clock), {}, nobody)


def test_a_worker_that_cannot_compute_does_not_start() -> None:
    with pytest.raises(StartupError, match="no kernel image"):
        loaded(BrokenRunner).warm_up()


def test_a_slow_first_step_does_not_cut_the_first_prompts_short() -> None:
    ready = loaded(ColdRunner)
    ready.warm_up()
    ready.engine.add(make_request("first", tokens(200)))
    assert ready.engine.step().prefill_tokens == 200


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
