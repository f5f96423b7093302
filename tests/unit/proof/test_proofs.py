"""Test criteria of proofs, their loads, and targets of mutation."""

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from proof.calibration import closing
from proof.calibration.closing import Knobs
from proof.calibration.engines import ENGINES, EngineKind
from proof.calibration.runs import (
    BURST,
    BURST_S,
    LEAD,
    LONG,
    RUNS,
    SHORT,
    Run,
    Served,
    Way,
    errors,
    figures,
    most_per_s,
    trace,
    worst,
)  # fmt: skip
from proof.exactness.answers import NEAR, Answer, PathVerdict, judge
from proof.index import __main__ as proof
from proof.mutation.targets import ROOT, TARGETS, Target
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
from tests.chaos.router_scene import ROUTERS, Left

BASE = of_sim_engine(ENGINES[EngineKind.SIM].worker, kv_token_bytes=2048, link_bytes_per_s=1e9, rpc_s=0.001)
ALIKE = dataclasses.replace(BASE, prefill_step_s=0.01, decode_context_s=1e-6, shared_step_s=0.015)


def test_half_of_the_runs_calibrate_and_every_way_is_in_both_halves() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS) == 12
    assert sum(run.is_calibrating for run in RUNS) == 6
    for half in (True, False):
        runs = [run for run in RUNS if run.is_calibrating is half]
        assert {run.way for run in runs} == set(Way)
        assert len({run.lengths for run in runs}) == 3
        assert BURST in {run.load for run in runs}


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_a_run_has_its_load_after_a_few_that_do_not_count(run: Run) -> None:
    requests = trace(run, BASE, seconds=40.0, seed=3).requests
    counted = requests[LEAD:]
    span_s = counted[-1].arrival_s - counted[0].arrival_s
    assert counted[0].arrival_s > requests[LEAD - 1].arrival_s
    share = len(counted) / (40.0 * most_per_s(BASE, run.way, run.lengths))
    assert share == pytest.approx(0.6 if run.load == BURST else run.load, abs=0.03)
    assert span_s < (3 * BURST_S if run.load == BURST else 80.0)
    assert trace(run, BASE, seconds=40.0, seed=3).requests == requests
    assert trace(run, BASE, seconds=40.0, seed=4).requests != requests


def test_two_mixed_workers_can_do_what_each_can() -> None:
    apart = 1 / most_per_s(BASE, Way.MIXED, LONG)
    prompt_s = 360 / 800
    answer_s = 11 * (0.02 + 8 * 0.001) / 8
    assert apart == pytest.approx((prompt_s + answer_s) / 2)
    assert most_per_s(BASE, Way.ALWAYS, LONG) == pytest.approx(1 / prompt_s)


def test_the_closest_knobs_are_those_that_made_the_figures() -> None:
    true = Knobs(prefill=1.17, decode=0.9, rpc_s=0.004)
    runs = []
    for way, lengths, load in ((Way.ALWAYS, SHORT, 0.5), (Way.MIXED, LONG, 0.4)):
        run = Run(way=way, lengths=lengths, load=load, is_calibrating=True)
        requests = trace(run, ALIKE, seconds=8.0, seed=1)
        runs.append((run, requests, closing.play(run, requests, true.of(ALIKE))))
    found, miss = closing.closest(ALIKE, runs)
    assert miss < 0.01
    assert (found.prefill, found.decode) == pytest.approx((true.prefill, true.decode), rel=0.03)


def test_knobs_scale_steps_and_nothing_else() -> None:
    made = Knobs(prefill=2.0, decode=3.0, rpc_s=0.005).of(ALIKE)
    assert made.step_s([(0, 160)], 0, 0) == pytest.approx(2 * ALIKE.step_s([(0, 160)], 0, 0))
    assert made.step_s([], 4, 900) == pytest.approx(3 * ALIKE.step_s([], 4, 900))
    assert made.shared_step_s == pytest.approx(2 * ALIKE.shared_step_s), "never more than either constant allows"
    for name in (field.name for field in dataclasses.fields(Calibration)):
        is_same = getattr(made, name) == getattr(ALIKE, name)
        assert is_same or name == "rpc_s" or name.startswith(("prefill", "decode", "shared")), name
    assert made.rpc_s == 0.005


def test_figures_of_a_run() -> None:
    served = [
        Served(arrival_s=10.0 + n, first_s=10.5 + n, last_s=12.5 + n, output_tokens=5) for n in range(4)
    ]  # fmt: skip
    found = figures(served)
    assert found["ttft_p50_s"] == found["ttft_p90_s"] == pytest.approx(0.5)
    assert found["tpot_mean_s"] == pytest.approx(0.5)
    assert found["tokens_per_s"] == pytest.approx(20 / 5.5)
    said = {**found, "ttft_p90_s": 0.45, "tpot_mean_s": 1.0}
    assert errors(found, said)["ttft_p90_s"] == pytest.approx(-0.1)
    assert worst(errors(found, said)) == pytest.approx(0.1), "only what is promised is judged"


VOCAB = 30


def row(best: int, second: int, gap: float = 1.0) -> Tensor:
    """Log-probabilities that fall from token to token, `best` and `second` first."""
    logits = torch.linspace(0.0, -6.0, VOCAB)
    logits[best], logits[second] = 3.0, 3.0 - gap
    return logits.log_softmax(-1)


def said(rows: list[Tensor], chosen: list[int] | None = None) -> Answer:
    """An answer with these distributions, and the best of each chosen unless `chosen` is given."""
    tops = [each.topk(20) for each in rows]
    best = [list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops]
    tokens = [pairs[0][0] for pairs in best]
    return Answer([1], tokens, chosen or tokens, best)


def verdict(dtype: str, ours: list[Tensor], theirs: list[Tensor], chosen: list[int] | None = None) -> PathVerdict:
    return judge(dtype, [(said(ours, chosen), torch.stack(theirs), True)])


ROWS = [row(3, 4), row(5, 6), row(7, 8), row(9, 10)]


def test_equal_answers_are_exact() -> None:
    for dtype in ("float32", "bfloat16"):
        found = verdict(dtype, ROWS, ROWS)
        assert (found.complaint, found.tokens, found.skipped, found.unequal, found.max_error) == ("", 4, 0, 0, 0.0)


def test_fp32_may_not_differ_by_more_than_the_limit() -> None:
    others = [*ROWS[:3], ROWS[3] + 2e-4]
    assert verdict("float32", others, ROWS).complaint == "log-probabilities differ by 2.0e-04"
    assert verdict("float32", [*ROWS[:3], ROWS[3] + 5e-5], ROWS).complaint == ""
    nothing = ROWS[3] * float("nan")
    for dtype in ("float32", "bfloat16"):
        assert verdict(dtype, [*ROWS[:3], nothing], ROWS).complaint == "log-probabilities differ by inf"


def test_fp32_tokens_differ_only_where_the_gap_is_unclear() -> None:
    assert verdict("float32", ROWS, ROWS, [3, 6, 7, 9]).complaint == "1 tokens differ"
    close = [*[row(n, n + 1) for n in range(5)], row(9, 10, gap=1e-6)]
    found = verdict("float32", close, close, [0, 1, 2, 3, 4, 10])
    assert (found.complaint, found.skipped, found.unequal) == ("", 1, 0)


def test_too_few_compared_tokens_are_a_complaint() -> None:
    close = [row(n, n + 1, gap=1e-6) for n in (3, 5)]
    assert verdict("float32", [*ROWS, *close], [*ROWS, *close]).complaint == "only 4 of 6 tokens could be compared"
    unclear = judge("float32", [(said(ROWS), torch.stack(ROWS), False)])
    assert unclear.complaint == "only 0 of 4 tokens could be compared"
    assert judge("bfloat16", []).complaint == "only 0 of 0 tokens could be compared"


def test_bf16_may_part_where_each_token_is_near_in_the_other() -> None:
    parted = [ROWS[0], row(6, 5), row(20, 21), row(22, 23)]
    found = verdict("bfloat16", parted, ROWS)
    assert (found.complaint, found.tokens, found.skipped) == ("", 4, 2), "what follows is another text"
    assert found.max_error < 2
    far = [ROWS[0], row(VOCAB - 1, 5), ROWS[2], ROWS[3]]
    assert verdict("bfloat16", far, ROWS).complaint == "1 tokens differ"
    theirs_is_far_from_ours = [ROWS[0], row(0, 1), ROWS[2], ROWS[3]]
    theirs = [ROWS[0], row(NEAR + 5, 0), ROWS[2], ROWS[3]]
    assert verdict("bfloat16", theirs_is_far_from_ours, theirs).complaint == "1 tokens differ"


SPREAD = 0.0125
"""Of a rate of 200 requests, as measured."""


class Scene:
    """Rates drawn around 0.7 for one router and `three` for three."""

    def __init__(self, seed: int, three: float, spread: float) -> None:
        self.routers = ["a", "b", "c"]
        self.prompts = SimpleNamespace(wrong=[])
        self.asked = 0
        self._dice, self._means, self._spread = random.Random(seed), {1: 0.7, ROUTERS: three}, spread

    def hit_rate(self, routers: Sequence[str], requests: int, questions: int) -> float:
        self.asked += 1
        return self._dice.gauss(self._means[len(routers)], self._spread)

    def kill_router(self, number: int, rng: random.Random) -> Left:
        return Left(asked=1, failed=0, probes=1, hits=1)


def pairs_and_verdict(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> tuple[int, bool]:
    @contextlib.contextmanager
    def made() -> Iterator[Scene]:
        yield scene

    monkeypatch.setattr(proof, "router_scene", made)
    is_kept = not proof.is_short(proof.run_routers(1))
    return scene.asked // 2 - proof.FIRST_PAIRS, is_kept


@pytest.mark.parametrize(("three", "kept"), [(0.7, True), (0.67, False)])
def test_ten_pairs_are_enough_where_they_say_it_clearly(
    monkeypatch: pytest.MonkeyPatch, three: float, kept: bool
) -> None:
    assert pairs_and_verdict(monkeypatch, Scene(1, three, 0.001)) == (proof.PAIRS, kept)


def test_what_is_not_clear_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.3 % less, as measured: a mean of ten is below the limit of 2 % one time in five."""
    found = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.987, SPREAD)) for seed in range(200)]
    assert max(pairs for pairs, _ in found) == proof.MOST_PAIRS
    assert sum(kept for _, kept in found) > 0.9 * len(found)
    monkeypatch.setattr(proof, "MOST_PAIRS", proof.PAIRS)
    ten = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.987, SPREAD)) for seed in range(200)]
    assert sum(kept for _, kept in ten) < 0.9 * len(ten)


def test_what_is_worse_than_allowed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [pairs_and_verdict(monkeypatch, Scene(seed, 0.7 * 0.97, SPREAD)) for seed in range(200)]
    assert sum(not kept for _, kept in found) > 0.95 * len(found)


def test_three_routers_that_find_too_little_stay_on_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(1, 0.6, 0.001)
    monkeypatch.setattr(proof, "router_scene", lambda: contextlib.nullcontext(scene))
    monkeypatch.setattr(sys, "argv", ["proof.index", "--seeds", "0", "--out", str(tmp_path / "index.json")])
    assert proof.main() == 1
    monkeypatch.setattr(proof, "router_scene", lambda: pytest.fail("it is measured again"))
    assert proof.main() == 1
    assert "--fresh" in capsys.readouterr().out


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


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_has_its_files_and_tests(target: Target) -> None:
    paths = target.paths()
    named = [*target.tests, *(test for path in paths for test in target.tests_of(path))]
    assert paths
    named = [name for name in named if name.startswith("tests/")]  # the others are pytest's options
    assert [name for name in named if not (ROOT / name.partition("::")[0]).exists()] == []


def test_a_pattern_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="no file matches core/nothing"):
        replace(TARGETS["ledger"], files=("core/nothing.py",)).paths()
