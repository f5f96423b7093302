"""The calibration's proof: the load that it plays to both sides, its calibration, and its comparison."""

from __future__ import annotations

import dataclasses

import pytest

from proof.calibration import closing
from proof.calibration.closing import Knobs
from proof.calibration.engines import ENGINES, EngineKind
from proof.calibration.figures import Served, errors, figures, worst
from proof.calibration.runs import BURST, BURST_S, LEAD, LONG, RUNS, SHORT, Run, Way, most_per_s, trace
from tandem.controlplane.simulator.calibration import Calibration, of_sim_engine

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
