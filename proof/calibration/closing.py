"""The simulator's side: a run on virtual time, and corrections from half of the runs to the measurements of an engine
alone.

In a cluster, steps take longer than in an engine by itself: workers share memory and cores with each other, with the
router and the client, and the step loop has work between steps. Three figures stand for all of that, one for prompts,
one for answers, one for the way between processes. They are those with which the simulator comes closest to the runs
that calibrate: least squares of relative errors, over every metric of each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proof.calibration.runs import LEAD, Run, Served, figures, setup
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.simulator import Simulator
from tandem.controlplane.simulator.traces import RequestLog

_STRIDES = (0.16, 0.08, 0.04, 0.02, 0.01)
"""Strides of the search, in logarithms of the factors."""
_RPC_STRIDES = 8
"""The way between processes is small and badly known: it goes in steps so many times as long."""
_LEAST_RPC_S, _MOST_RPC_S = 1e-4, 0.05
_MOST_PASSES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Steps with prompts take `prefill` times as long as measured alone, decode steps `decode` times."""

    prefill: float = 1.0
    decode: float = 1.0
    rpc_s: float = 0.001

    def of(self, base: Calibration) -> Calibration:
        return dataclasses.replace(
            base,
            prefill_step_s=base.prefill_step_s * self.prefill,
            prefill_token_s=base.prefill_token_s * self.prefill,
            prefill_context_s=base.prefill_context_s * self.prefill,
            decode_step_s=base.decode_step_s * self.decode,
            decode_sequence_s=base.decode_sequence_s * self.decode,
            decode_context_s=base.decode_context_s * self.decode,
            shared_step_s=base.shared_step_s * min(self.prefill, self.decode),
            rpc_s=self.rpc_s,
        )


def play(run: Run, trace: RequestLog, calibration: Calibration) -> dict[str, float]:
    """The figures that the simulator gives."""
    records = Simulator(setup(run, calibration), trace).run().records
    served = [
        Served(
            arrival_s=one.arrival_s, first_s=one.arrival_s + one.ttft_s, last_s=one.arrival_s + one.e2e_s,
            output_tokens=one.output_tokens,
        )
        for one in records[LEAD:]
    ]  # fmt: skip
    return figures(served)


def closest(base: Calibration, runs: Sequence[tuple[Run, RequestLog, Mapping[str, float]]]) -> tuple[Knobs, float]:
    """The knobs with which the simulator comes closest to the measurements in `runs`; and the mean error that stays,
    root of the mean square."""

    def miss(knobs: Knobs) -> float:
        calibration = knobs.of(base)
        squares = []
        for run, trace, real in runs:
            said = play(run, trace, calibration)
            squares += [math.log(said[name] / value) ** 2 for name, value in real.items()]
        return math.sqrt(sum(squares) / len(squares))

    return _descend(miss, Knobs())


def _descend(miss: Callable[[Knobs], float], start: Knobs) -> tuple[Knobs, float]:
    """One knob after the other, up or down, in shorter and shorter strides. Deterministic, and needs no derivative,
    which quantiles do not have."""
    best, least = start, miss(start)
    known = {start: least}
    for stride in _STRIDES:
        for _ in range(_MOST_PASSES):
            before = least
            for near in _neighbours(best, stride):
                if near not in known:
                    known[near] = miss(near)
                if known[near] < least:
                    best, least = near, known[near]
            if least == before:
                break
    return best, least


def _neighbours(knobs: Knobs, stride: float) -> list[Knobs]:
    up, down = math.exp(stride), math.exp(-stride)
    return [
        *(dataclasses.replace(knobs, prefill=knobs.prefill * by) for by in (up, down)),
        *(dataclasses.replace(knobs, decode=knobs.decode * by) for by in (up, down)),
        *(dataclasses.replace(knobs, rpc_s=_within(knobs.rpc_s * by**_RPC_STRIDES)) for by in (up, down)),
    ]


def _within(rpc_s: float) -> float:
    return min(_MOST_RPC_S, max(_LEAST_RPC_S, rpc_s))
