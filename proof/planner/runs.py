"""Runs of the planner's proof: two traces in a row, to every fixed split of eight workers and to a planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.controlplane.planner import hardware
from tandem.controlplane.planner.records import RoleSplit, Rules
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.planner_rates import SETTINGS, STEPS
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.simulator import Outcome, Simulator
from tandem.controlplane.simulator.summary import attained
from tandem.controlplane.simulator.traces import RequestLog
from tandem.core.config import AdmissionSection, Disaggregation, PlannerMode, PolicyName, SloSection
from tandem.core.prefill_queue import QueueRules
from tandem.router.routing.policies import create_policy

WORKERS = 8
START = RoleSplit(6, 2)
"""Split with which the planner starts."""
PLANNER = "planner"
FIXED = tuple(RoleSplit(prefill, WORKERS - prefill) for prefill in range(1, WORKERS))
NAMES = (*map(str, FIXED), PLANNER)
_TIMES = (
    "prefill_step_s", "prefill_token_s", "prefill_context_s",
    "decode_step_s", "decode_sequence_s", "decode_context_s", "max_step_s",
)  # fmt: skip
MOST_FLIPS = 6
NEAR = 0.95
"""Least part of the best split's goodput, in each half."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Both traces at `first_scale` and `second_scale` times their own rates, at most `seconds` of each; the promises,
    and the workers."""

    first_scale: float
    second_scale: float
    seconds: float
    promise: SloSection
    calibration: Calibration
    disaggregation: Disaggregation = Disaggregation.AUTO

    def trace(self, first: RequestLog, second: RequestLog) -> tuple[RequestLog, float]:
        """Both traces in a row, and the start of the second."""
        before = first.scaled(self.first_scale).first(self.seconds)
        return before.followed_by(self.second_half(second)), before.span_s

    def second_half(self, second: RequestLog) -> RequestLog:
        """The second trace, alone."""
        return second.scaled(self.second_scale).first(self.seconds)


def workers(slower: float = 1.0) -> Calibration:
    """The workers: Qwen3-32B's shapes on two A100 each, by arithmetic; `slower`: every step takes as many times as
    long, so that fewer requests are as much work."""
    rates = hardware.rates(hardware.HARDWARE["a100"], hardware.MODELS["qwen3-32b"], 2)
    assert rates is not None
    how = "" if slower == 1.0 else f", {slower:g} times as slow"
    name = f"Qwen3-32B shapes, two A100 a worker{how}: by arithmetic, not measured"
    made = Calibration(
        name=name, prefill_token_s=1 / rates.prefill.tokens_per_s, prefill_context_s=rates.prefill.context_s,
        **{part: getattr(rates, part) for part in (*SETTINGS, *STEPS)},
    )  # fmt: skip
    return dataclasses.replace(made, **{part: getattr(made, part) * slower for part in _TIMES})


def setup(load: Load, name: str) -> Setup:
    """Setup of one of NAMES."""
    is_planned = name == PLANNER
    split = START if is_planned else next(split for split in FIXED if str(split) == name)
    return Setup(
        policy=create_policy(PolicyName.COST, load.disaggregation), queue=QueueRules(), admission=AdmissionSection(),
        calibration=load.calibration, prefill=split.prefill, decode=split.decode, promises={"": load.promise},
        planner=Rules(mode=PlannerMode.ACT, budget=WORKERS) if is_planned else None,
    )  # fmt: skip


def play(load: Load, name: str, first: RequestLog, second: RequestLog) -> dict[str, Any]:
    """Goodput in each half and over the whole, and what the planner did. For a fixed split also that of the second half
    when nothing came before it: in a row it begins with what the first one has left waiting."""
    trace, change_s = load.trace(first, second)
    outcome = Simulator(setup(load, name), trace).run()
    halves = [[r for r in outcome.records if (r.arrival_s >= change_s) is is_second] for is_second in (False, True)]
    kept = [attained(half, load.promise) for half in halves]
    spans_s = [change_s, trace.span_s - change_s]
    return {
        "requests": [len(half) for half in halves],
        "attained": [round(share, 4) for share in kept],
        "goodput_per_s": [
            round(share * len(half) / max(span_s, 1e-9), 4)
            for share, half, span_s in zip(kept, halves, spans_s, strict=True)
        ],
        "attained_in_all": round(attained(outcome.records, load.promise), 4),
        **({} if name == PLANNER else {"second_alone_per_s": _alone(load, name, second)}),
        **_changes(outcome),
    }


def _alone(load: Load, name: str, second: RequestLog) -> float:
    """Goodput of a fixed split in the second half without the first."""
    trace = load.second_half(second)
    records = Simulator(setup(load, name), trace).run().records
    return round(attained(records, load.promise) * len(records) / max(trace.span_s, 1e-9), 4)


def _changes(outcome: Outcome) -> dict[str, Any]:
    acted = [decision for decision in outcome.decisions if decision.is_to_act]
    return {
        "flips": len(outcome.flips),
        "most_workers": max((decision.wanted.total for decision in outcome.decisions), default=WORKERS),
        "changes": [
            {"at_s": round(one.at_s, 1), "from": str(one.current), "to": str(one.wanted), "why": one.reason}
            for one in acted
        ],
        "longest_drain_s": round(max((flip.drained_s - flip.asked_s for flip in outcome.flips), default=0.0), 2),
    }


def broken(done: Mapping[str, Mapping[str, Any]], names: Sequence[str] = NAMES) -> Sequence[str]:
    """The promises that were not kept, in words; `done` has all of `names`, the planner and some fixed splits."""
    planned, fixed = done[PLANNER], {name: done[name] for name in names if name != PLANNER}
    found = []
    for half, which in enumerate(("first", "second")):
        swept = {name: best_of_half(entry, half) for name, entry in fixed.items()}
        best = max(swept, key=lambda name: swept[name])
        share = planned["goodput_per_s"][half] / max(swept[best], 1e-9)
        if share < NEAR:
            found.append(f"{share:.1%} of the goodput of {best}, the best split of the {which} half")
    best = max(fixed, key=lambda name: fixed[name]["attained_in_all"])
    if planned["attained_in_all"] <= fixed[best]["attained_in_all"]:
        found.append(f"{planned['attained_in_all']:.1%} in all, {best} has {fixed[best]['attained_in_all']:.1%}")
    if planned["flips"] > MOST_FLIPS:
        found.append(f"{planned['flips']} flips")
    if planned["most_workers"] > WORKERS:
        found.append(f"{planned['most_workers']} workers")
    return found


def best_of_half(entry: Mapping[str, Any], half: int) -> float:
    """Goodput of a fixed split in a half: in a row, or alone if that is more and is known."""
    in_a_row = float(entry["goodput_per_s"][half])
    return max(in_a_row, float(entry.get("second_alone_per_s", 0.0))) if half else in_a_row
