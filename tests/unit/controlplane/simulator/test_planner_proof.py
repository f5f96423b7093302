"""Test the proofs of the planner and the simulator: slices, loads and criteria."""

import copy
import dataclasses
from typing import Any

import pytest

from proof.laboratory import virtual
from proof.laboratory.real import Idle
from proof.laboratory.runs import RUNS, SHIFT_S, SHRUNK, Served, errors, figures, part, prompts, shifted
from proof.planner.runs import FIXED, NAMES, PLANNER, START, Load, broken, play
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tandem.controlplane.simulator.workloads import varied
from tandem.core.config import PolicyName, SloSection

CODE = varied(requests=240, rate=3.0, prompt_tokens=2000, output_tokens=25, seed=1)
CONVERSATION = varied(requests=400, rate=5.0, prompt_tokens=600, output_tokens=350, seed=2)
SLOW = dataclasses.replace(
    Calibration(), prefill_token_s=5e-4, prefill_context_s=0.0, decode_step_s=0.02, decode_sequence_s=0.001,
    decode_context_s=0.0,
)  # fmt: skip
LOAD = Load(
    first_scale=1.0, second_scale=1.0, seconds=80.0, promise=SloSection(ttft_s=3.0, itl_s=0.05), calibration=SLOW
)


def test_the_planner_of_the_slice_beats_the_split_that_it_begins_with() -> None:
    planned, fixed = (play(LOAD, name, CODE, CONVERSATION) for name in (PLANNER, str(START)))
    assert planned["attained_in_all"] > fixed["attained_in_all"]
    assert planned["flips"] <= 6
    assert planned["most_workers"] == 8
    assert planned["changes"]
    assert sum(planned["requests"]) == len(LOAD.trace(CODE, CONVERSATION)[0].requests)


def made_up() -> dict[str, Any]:
    """Results that keep every promise."""
    one = {"goodput_per_s": [1.0, 1.0], "attained_in_all": 0.5, "flips": 0, "most_workers": 8}
    done = {name: dict(one) for name in NAMES}
    done[PLANNER] |= {"goodput_per_s": [0.95, 0.96], "attained_in_all": 0.51, "flips": 6}
    return done


def test_seven_splits_and_a_planner() -> None:
    assert len(FIXED) == 7
    assert len(NAMES) == 8
    assert broken(made_up()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"goodput_per_s": [0.94, 1.0]}, "94.0% of the goodput of 1P:7D, the best split of the first half"),
        ({"goodput_per_s": [1.0, 0.9]}, "best split of the second half"),
        ({"attained_in_all": 0.5}, "50.0% in all"),
        ({"flips": 7}, "7 flips"),
        ({"most_workers": 9}, "9 workers"),
    ],
)
def test_what_breaks_a_promise(changes: dict[str, Any], said: str) -> None:
    done = copy.deepcopy(made_up())
    done[PLANNER] |= changes
    (found,) = broken(done)
    assert said in found


def test_the_second_half_is_swept_without_what_the_first_has_left_waiting() -> None:
    fixed = play(LOAD, str(START), CODE, CONVERSATION)
    assert fixed["second_alone_per_s"] >= fixed["goodput_per_s"][1]
    done = made_up()
    done["4P:4D"] |= {"second_alone_per_s": 1.1}
    (found,) = broken(done)
    assert "87.3% of the goodput of 4P:4D, the best split of the second half" in found


IDLE = Idle(short_s=64 / 750 + 0.01, long_s=704 / 750 + 0.01, step_s=0.022, kv_tokens=12_000)


def request(arrival_s: float, prompt_tokens: int, *blocks: int) -> TraceRequest:
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=320, blocks=blocks)


TRACE = RequestLog(
    name="t",
    requests=(
        request(590.0, 512, 1),
        request(600.0, 1500, 1, 2, 3),
        request(610.0, 1024 + 512, 1, 2, 4),
        request(640.0, 200_000, *range(100, 491)),
    ),
)


def test_a_run_plays_its_part_of_the_trace_shrunk() -> None:
    run = dataclasses.replace(RUNS[0], from_s=600.0)
    one, two, three = part(TRACE, run, scale=2.0, seconds=30.0, max_tokens=4096).requests
    assert (one.arrival_s, two.arrival_s, three.arrival_s) == (0.0, 5.0, 20.0)
    assert (one.prompt_tokens, one.output_tokens) == (1500 // SHRUNK, 10)
    assert three.prompt_tokens == 4096 - 10, "no longer than the model can"
    assert len(part(TRACE, run, scale=1.0, seconds=10.0, max_tokens=4096).requests) == 1


def test_equal_ids_are_equal_tokens() -> None:
    played = part(TRACE, dataclasses.replace(RUNS[0], from_s=0.0), scale=1.0, seconds=1000.0, max_tokens=4096)
    first, second, third, long = prompts(played)
    assert [len(first), len(second), len(third), len(long)] == [r.prompt_tokens for r in played.requests]
    assert first == second[:16]
    assert second[:32] == third[:32]
    assert second[32:] != third[32 : len(second)]
    unknown = dataclasses.replace(played, requests=(dataclasses.replace(played.requests[0], blocks=()),) * 2)
    assert prompts(unknown)[0] != prompts(unknown)[1]


def test_runs_differ_in_policy_and_queue() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS) == 5
    assert {run.policy for run in RUNS} >= {PolicyName.COST, PolicyName.LEAST_LOADED}
    assert {run.queue.stretch > 0 for run in RUNS} == {True, False}


def test_a_seed_moves_where_runs_begin() -> None:
    assert shifted(RUNS, 0) == RUNS
    for seed in (1, 2, 3):
        by_s = {after.from_s - before.from_s for before, after in zip(RUNS, shifted(RUNS, seed), strict=True)}
        assert len(by_s) == 1
        assert 0.0 < by_s.pop() <= SHIFT_S
        assert shifted(RUNS, seed) == shifted(RUNS, seed) != shifted(RUNS, seed + 1)


def test_the_laboratory_is_calibrated_by_the_idle_cluster() -> None:
    found = virtual.calibration(RUNS[0], IDLE)
    assert 1 / found.prefill_token_s == pytest.approx(750.0)
    assert found.rpc_s == pytest.approx(0.005)
    assert found.decode_step_s + found.decode_sequence_s == pytest.approx(0.022)
    assert (found.kv_tokens, found.block_tokens) == (12_000, 16)
    trace = RequestLog(
        name="t", requests=(TraceRequest(arrival_s=0.0, prompt_tokens=64, output_tokens=3),), block_tokens=16
    )
    (served,), busy_s = virtual.play(RUNS[0], trace, IDLE)
    assert served.ttft_s == pytest.approx(IDLE.short_s), "an idle request takes what it was measured to take"
    assert sum(busy_s) == pytest.approx(64 / 750)


def test_errors_are_parts_of_what_is_real() -> None:
    slow = [Served(ttft_s=s, e2e_s=2 * s, prompt_tokens=100, cached_tokens=50) for s in (1.0, 2.0, 3.0)]
    fast = [dataclasses.replace(one, ttft_s=one.ttft_s * 0.9, cached_tokens=60) for one in slow]
    found = errors(figures(slow, [4.0, 6.0]), figures(fast, [5.0, 5.5]))
    assert found["ttft_mean_s"] == found["ttft_p50_s"] == pytest.approx(-0.1)
    assert found["hit_rate"] == pytest.approx(0.2)
    assert found["e2e_mean_s"] == 0.0
    assert found["prefill_busy_s"] == pytest.approx(0.05)
