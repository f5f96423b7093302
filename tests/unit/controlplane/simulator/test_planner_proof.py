"""The planner's proof: a slice of its runs on made-up requests, and its criteria for a failure."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from proof.planner.runs import FIXED, NAMES, PLANNER, START, Load, broken, play
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.workloads import varied
from tandem.core.config import SloSection

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
