"""A worker that is ready has computed, and knows nothing of its warm-up any more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import StartupError
from tandem.core.fingerprint import Fingerprint
from tandem.engine.engine import Engine
from tandem.engine.sim.runner import SimRunner
from tandem.worker.loading import Loaded
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
