"""A worker's measurements of its own decode steps."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.model_work import ModelWork
from tandem.engine.request import StepResult
from tandem.router.routing.observed_traffic import COMPUTING_SECONDS
from tandem.workercore.load_meter import DecodePace, LoadMeter

SHELL: Any = SimpleNamespace(count=lambda name, by=1: None, work=None)


def test_nothing_is_known_at_first() -> None:
    assert (DecodePace().step_s, DecodePace().sequence_s) == (0.0, 0.0)


def test_steps_of_one_size_say_nothing_of_sequences() -> None:
    pace = DecodePace()
    for _ in range(50):
        pace.observe(8, 0.02)
    assert (pace.step_s, pace.sequence_s) == (0.02, 0.0)


def test_what_one_more_sequence_adds() -> None:
    pace = DecodePace()
    for step in range(400):
        sequences = 1 + step % 32
        pace.observe(sequences, 0.01 + 0.0005 * sequences)
    assert pace.sequence_s == pytest.approx(0.0005)
    for step in range(1500):  # a new model of the machine: the old one fades
        sequences = 1 + step % 32
        pace.observe(sequences, 0.01 + 0.002 * sequences)
    assert pace.sequence_s == pytest.approx(0.002, rel=0.01)


def test_noise_that_says_more_sequences_are_faster_is_no_knowledge() -> None:
    pace = DecodePace()
    for step in range(100):
        pace.observe(1 + step % 4, 0.01 - 0.001 * (step % 4))
    assert pace.sequence_s == 0.0


def test_seconds_of_steps_that_computed_prompts_are_counted_by_themselves() -> None:
    counters = Counter[str]()
    context: Any = SimpleNamespace(count=lambda name, by=1: counters.update({name: by}), work=None)
    meter = LoadMeter(context)
    meter.measure(StepResult(prefill_tokens=512, decode_tokens=3, started_s=1.0, ended_s=1.25))
    meter.measure(StepResult(decode_tokens=3, started_s=2.0, ended_s=2.5))
    assert (counters["prefill_step_seconds"], counters["step_seconds"]) == (0.25, 0.75)
    assert COMPUTING_SECONDS in counters, "the name under which routers look for it"
    assert not {"model_flops", "model_read_bytes"} & set(counters), "no model is computed"


def test_a_decode_step_is_as_long_as_tokens_are_apart() -> None:
    meter = LoadMeter(SHELL)
    for step in range(3):  # a loop that needs 2 ms between steps of 20 ms
        meter.measure(StepResult(decode_tokens=3, started_s=0.022 * step, ended_s=0.022 * step + 0.02))
    assert meter.decode_step_s == pytest.approx(0.022)
    meter.rest()
    for step in range(10):  # each after a pause, which no token waited for
        meter.measure(StepResult(decode_tokens=3, started_s=10.0 + step, ended_s=10.02 + step))
        meter.rest()
    assert meter.decode_step_s == pytest.approx(0.02)


def test_work_of_a_model_is_counted_by_its_shape() -> None:
    counters = Counter[str]()
    work = ModelWork(
        token_flops=10, row_flops=100, pair_flops=1, token_weight_bytes=1000, row_weight_bytes=500, kv_token_bytes=2
    )
    context: Any = SimpleNamespace(count=lambda name, by=1: counters.update({name: by}), work=work)
    meter = LoadMeter(context)
    meter.measure(StepResult(prefill_tokens=4, context_tokens=4, attended=8.0))  # a chunk: no logits are requested
    meter.measure(StepResult(decode_tokens=2, context_tokens=7, attended=6.0, logit_rows=2))
    meter.measure(StepResult())
    assert counters["model_flops"] == (40 + 10) + (20 + 200 + 7)
    assert counters["model_read_bytes"] == (1000 + 8) + (1500 + 14)
