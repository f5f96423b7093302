"""The planner's proof with real processes: the same seconds of work, in fewer messages and faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.planner.real import (
    LONGEST_ANSWER,
    LONGEST_PROMPT,
    TOKEN_BYTES,
    Scale,
    most_workers,
    settings,
    trace_of,
    write_model,
)  # fmt: skip
from proof.planner.runs import PLANNER, Load
from tandem.controlplane.simulator.calibration import Calibration, of_sim_engine
from tandem.controlplane.simulator.workloads import varied
from tandem.core import config_loader
from tandem.core.config import ClusterConfig, Disaggregation, PlannerMode, SloSection
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout

CODE = varied(requests=40, rate=3.0, prompt_tokens=2000, output_tokens=25, seed=1)
CONVERSATION = varied(requests=60, rate=5.0, prompt_tokens=600, output_tokens=350, seed=2)
CALIBRATION = Calibration(
    prefill_step_s=0.01, prefill_token_s=5e-4, prefill_context_s=1e-7, decode_step_s=0.02, decode_sequence_s=0.001,
    decode_context_s=1e-6, chunk_tokens=1024,
)  # fmt: skip
LOAD = Load(
    first_scale=1.0, second_scale=1.0, seconds=80.0, promise=SloSection(ttft_s=3.0, itl_s=0.05),
    calibration=CALIBRATION, disaggregation=Disaggregation.ALWAYS,
)  # fmt: skip
SCALE = Scale(speed=2.0, shrink=8)


def config(name: str, folder: Path) -> ClusterConfig:
    file = folder / "cluster.toml"
    file.write_text(settings(LOAD, name, SCALE, folder))
    return config_loader.load(file, ClusterConfig)


def test_seconds_of_work_stay_and_all_of_it_is_faster(tmp_path: Path) -> None:
    whole, change_s = LOAD.trace(CODE, CONVERSATION)
    trace, live_change_s = trace_of(LOAD, CODE, CONVERSATION, SCALE)
    assert len(trace.requests) == len(whole.requests)
    assert trace.span_s == pytest.approx(whole.span_s / 2)
    assert live_change_s == pytest.approx(change_s / 2)
    made = config(PLANNER, tmp_path)
    prompt_s = sum(one.prompt_tokens for one in trace.requests) / made.worker.sim.prefill_tokens_per_s
    assert prompt_s == pytest.approx(sum(one.prompt_tokens for one in whole.requests) * 5e-4 / 2, rel=0.01)
    answer_s = sum(one.output_tokens for one in trace.requests) * made.worker.sim.decode_step_s
    assert answer_s == pytest.approx(sum(one.output_tokens for one in whole.requests) * 0.02 / 2, rel=0.05)
    live = of_sim_engine(made.worker, kv_token_bytes=1, link_bytes_per_s=1.0, rpc_s=0.0)
    assert live.step_s([(128, 256)], 0, 0) == pytest.approx(CALIBRATION.step_s([(1024, 2048)], 0, 0) / 2)
    assert live.step_s([], 10, 1000) == pytest.approx(CALIBRATION.step_s([], 10, 8000) * 8 / 2)
    assert made.worker.chunk_tokens == CALIBRATION.chunk_tokens // 8
    assert made.slo["proof"] == SloSection(ttft_s=1.5, itl_s=0.2)
    assert (made.planner.mode, made.planner.window_s, made.planner.budget) == (PlannerMode.ACT, 30.0, 8)
    assert (made.pools.prefill, made.pools.decode) == (6, 2)


def test_a_fixed_split_has_no_planner(tmp_path: Path) -> None:
    made = config("2P:6D", tmp_path)
    assert (made.pools.prefill, made.pools.decode, made.planner.mode) == (2, 6, PlannerMode.OFF)


def test_the_simulated_model_has_few_bytes_a_token(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    model = read_model_config(tmp_path / "model")
    layout = kv_layout(model, dtype="bfloat16", block_tokens=16, tp=1)
    assert sum(spec.block_bytes(1) for spec in layout.groups) == 16 * TOKEN_BYTES
    assert model.max_positions >= LONGEST_PROMPT + LONGEST_ANSWER


def test_the_most_workers_are_those_of_any_moment() -> None:
    told = [
        ("cluster_started", "`up`: version 99: prefill 99"),
        ("desired_changed", "version 1: prefill 6, decode 2"),
        ("desired_changed", "version 2: prefill 6, decode-a100 3"),
        ("desired_changed", "version 3: prefill 1, decode 2"),
        ("desired_changed", "version 4: stop"),
    ]
    assert most_workers([{"kind": kind, "reason": reason} for kind, reason in told]) == 9
    assert most_workers([]) == 0
