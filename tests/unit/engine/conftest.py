"""Engines on the bundled model, with runners that are made once a file."""

from collections.abc import Callable

import pytest

from tandem.core.clock import MonotonicClock
from tandem.engine.engine import Engine
from tandem.engine.output_grammars import OutputGrammars
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tests.unit.engine.bundled import MODEL


@pytest.fixture(scope="module")
def new_engine() -> Callable[..., Engine]:
    runners: dict[int, ModelRunner] = {}

    def make(num_blocks: int = 200, grammars: OutputGrammars | None = None, **config: object) -> Engine:
        if num_blocks not in runners:
            runners[num_blocks] = ModelRunner(
                model_dir=MODEL, dtype="float32", num_blocks=num_blocks, max_model_len=min(512, 16 * num_blocks)
            )
        settings = {"max_step_s": 1e9} | config
        scheduling = SchedulerConfig(**settings)  # type: ignore[arg-type]
        return Engine(runners[num_blocks], config=scheduling, clock=MonotonicClock(), grammars=grammars)

    return make
