"""The runs: workers, lengths and loads, half of them to calibrate; and the figures of a run that both sides give."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.controlplane.planner.records import RoleSplit
from tandem.controlplane.simulator.calibration import Calibration
from tandem.controlplane.simulator.setup import Setup
from tandem.controlplane.simulator.summary import quantile
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tandem.controlplane.simulator.workloads import varied
from tandem.core.config import AdmissionSection, Disaggregation, PolicyName
from tandem.core.prefill_queue import QueueRules
from tandem.router.routing.policies import create_policy

LEAD = 4
"""Requests before the counted ones: they open streams and measure links. Both sides get them; neither counts them."""
_LEAD_TOKENS, _LEAD_OUTPUT = 128, 4
_LEAD_APART_S, _REST_S = 1.0, 2.0
BURST = math.inf
"""A load: all requests come within BURST_S, and are served as fast as they can be."""
BURST_S = 5.0
_BURST_SHARE = 0.6
"""Part of the requests that a run's seconds could serve, for a burst."""
_FULL = 8
"""Sequences of a decode step in a cluster that counts as full."""
JUDGED = ("ttft_p50_s", "ttft_p90_s", "tokens_per_s")
"""Metrics by which a prediction is judged."""


class Way(StrEnum):
    """Two workers: every prompt computed by one and answered by the other, or as the router finds cheaper, or both
    doing both."""

    ALWAYS = "1P:1D"
    AUTO = "1P:1D, auto"
    MIXED = "2 mixed"

    @property
    def disaggregation(self) -> Disaggregation:
        return Disaggregation.ALWAYS if self is Way.ALWAYS else Disaggregation.AUTO

    @property
    def workers(self) -> RoleSplit:
        return RoleSplit(0, 0, 2) if self is Way.MIXED else RoleSplit(1, 1)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens on average; prompts and answers are log-normal, half to twice that as a rule."""

    name: str
    prompt_tokens: int
    output_tokens: int


SHORT, MEDIUM, LONG = Lengths("short", 64, 40), Lengths("medium", 160, 24), Lengths("long", 360, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. `load`: part of the workers' capacity, or BURST. `is_calibrating`: in the half that is not predicted."""

    way: Way
    lengths: Lengths
    load: float
    is_calibrating: bool

    @property
    def name(self) -> str:
        return f"{self.way.value}, {self.lengths.name}, {'burst' if self.load == BURST else f'load {self.load:g}'}"


def _of(way: Way, *loads: tuple[Lengths, float]) -> list[Run]:
    """Runs of a way; every other one calibrates."""
    first = list(Way).index(way)
    return [
        Run(way=way, lengths=lengths, load=load, is_calibrating=(number + first) % 2 == 0)
        for number, (lengths, load) in enumerate(loads)
    ]


RUNS = (
    *_of(Way.ALWAYS, (MEDIUM, 0.3), (SHORT, 0.4), (LONG, 0.5), (MEDIUM, BURST)),
    *_of(Way.AUTO, (SHORT, 0.3), (MEDIUM, 0.5), (LONG, 0.4), (SHORT, BURST)),
    *_of(Way.MIXED, (LONG, 0.3), (MEDIUM, 0.4), (SHORT, 0.5), (LONG, BURST)),
)


def trace(run: Run, base: Calibration, *, seconds: float, seed: int) -> RequestLog:
    """LEAD requests one by one, a rest, then those that count for `seconds` at most. `base`: what workers can do."""
    most = seconds * most_per_s(base, run.way, run.lengths)
    count = max(8, round(most * (_BURST_SHARE if run.load == BURST else run.load)))
    rate = count / (min(BURST_S, seconds) if run.load == BURST else seconds)
    dice = random.Random(f"{seed} {run.name}")
    made = varied(
        requests=count, rate=rate, prompt_tokens=run.lengths.prompt_tokens, output_tokens=run.lengths.output_tokens,
        seed=dice.randrange(1 << 30),
    )  # fmt: skip
    lead = [
        TraceRequest(arrival_s=number * _LEAD_APART_S, prompt_tokens=_LEAD_TOKENS, output_tokens=_LEAD_OUTPUT)
        for number in range(LEAD)
    ]
    after_s = LEAD * _LEAD_APART_S + _REST_S
    counted = [dataclasses.replace(one, arrival_s=one.arrival_s + after_s) for one in made.requests]
    return RequestLog(name=run.name, requests=(*lead, *counted))


def most_per_s(base: Calibration, way: Way, lengths: Lengths) -> float:
    """Requests a second that the two workers could serve if they never waited, with full decode steps."""
    prompt, output = lengths.prompt_tokens, lengths.output_tokens
    prompt_s = base.prefill_step_s + base.chunk_s(0, prompt)
    answer_s = (output - 1) * base.decode_s(_FULL, _FULL * (prompt + output / 2)) / _FULL
    return 2 / (prompt_s + answer_s) if way is Way.MIXED else 1 / max(prompt_s, answer_s)


def setup(run: Run, calibration: Calibration) -> Setup:
    """The simulated cluster, with the defaults of a real one."""
    split = run.way.workers
    return Setup(
        policy=create_policy(PolicyName.COST, run.way.disaggregation), queue=QueueRules(), calibration=calibration,
        prefill=split.prefill, decode=split.decode, mixed=split.mixed, max_tokens=None, admission=AdmissionSection(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its client saw it; moments are seconds from the start of the run."""

    arrival_s: float
    first_s: float
    last_s: float
    output_tokens: int


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Metric → value. Throughput is from the first arrival to the last token."""
    ttft_s = sorted(one.first_s - one.arrival_s for one in served)
    tpot_s = [(one.last_s - one.first_s) / (one.output_tokens - 1) for one in served if one.output_tokens > 1]
    span_s = max(one.last_s for one in served) - min(one.arrival_s for one in served)
    return {
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p90_s": quantile(ttft_s, 0.9),
        "tokens_per_s": sum(one.output_tokens for one in served) / span_s,
        "ttft_mean_s": statistics.fmean(ttft_s),
        "tpot_mean_s": statistics.fmean(tpot_s),
    }


def errors(real: Mapping[str, float], said: Mapping[str, float]) -> dict[str, float]:
    """The prediction's relative errors: too much (+) or too little, as a part of the real value."""
    return {name: said[name] / value - 1 for name, value in real.items()}


def worst(errors_of: Mapping[str, float]) -> float:
    """The largest error of a judged metric, without its sign."""
    return max(abs(errors_of[name]) for name in JUDGED)
