"""The cost of tokens, by the phase and the workers that computed them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.ids import WorkerId
from tandem.core.lifecycle import RoleName
from tandem.router.metrics.cost import WINDOW_S, CostMeter, WorkerCounts

P, D, M = WorkerId("p"), WorkerId("d"), WorkerId("m")
ZERO = WorkerCounts(
    role=RoleName.PREFILL, price_per_h=3.6, step_s=0, prefill_step_s=0, prefill_tokens=0, decode_tokens=0
)
"""A thousandth a second."""


def test_each_phase_pays_for_its_own_workers() -> None:
    meter, decode = CostMeter(), replace(ZERO, role=RoleName.DECODE, price_per_h=7.2)
    meter.look({P: ZERO, D: decode}, 0.0)
    assert meter.per_million() == {}
    now = {
        P: replace(ZERO, step_s=5, prefill_step_s=5, prefill_tokens=20_000),
        D: replace(decode, step_s=9, decode_tokens=1_000),
    }
    meter.look(now, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 0.5, "decode": 20.0})


def test_a_mixed_worker_is_split_by_the_time_of_its_steps() -> None:
    meter, mixed = CostMeter(), replace(ZERO, role=RoleName.MIXED)
    meter.look({M: mixed}, 0.0)
    meter.look({M: replace(mixed, step_s=8, prefill_step_s=2, prefill_tokens=1_000, decode_tokens=1_000)}, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 2.5, "decode": 7.5})


def test_idle_workers_cost_as_much() -> None:
    meter, decode = CostMeter(), replace(ZERO, role=RoleName.DECODE)
    every = {P: ZERO, D: decode, WorkerId("p2"): ZERO}
    meter.look(every, 0.0)
    meter.look(every | {P: replace(ZERO, step_s=1, prefill_step_s=1, prefill_tokens=1_000)}, 10.0)
    assert meter.per_million() == pytest.approx({"prefill": 20.0})


@pytest.mark.parametrize("change", [{"step_s": 1.0, "prefill_tokens": 0}, {"role": RoleName.DECODE, "step_s": 99.0}])
def test_counters_that_began_again_are_left_out(change: dict[str, float]) -> None:
    meter = CostMeter()
    meter.look({P: replace(ZERO, step_s=50, prefill_step_s=50, prefill_tokens=9_000)}, 0.0)
    meter.look({P: replace(ZERO, **change)}, 10.0)  # type: ignore[arg-type]
    assert meter.per_million() == {}


def test_only_the_last_minute_counts() -> None:
    meter, tokens = CostMeter(), 0
    for second in range(0, 300, 5):
        tokens += 5_000 if second < 200 else 500
        meter.look({P: replace(ZERO, step_s=second, prefill_step_s=second, prefill_tokens=tokens)}, float(second))
    assert meter.per_million() == pytest.approx({"prefill": 10.0})
    assert len(meter._looks) <= WINDOW_S / 5 + 2


def test_without_a_price_there_is_no_cost() -> None:
    meter, free = CostMeter(), replace(ZERO, price_per_h=0.0)
    meter.look({P: free}, 0.0)
    meter.look({P: replace(free, step_s=5, prefill_step_s=5, prefill_tokens=1_000)}, 10.0)
    assert meter.per_million() == {}
