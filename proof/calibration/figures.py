"""The figures of a run that both sides give, and how far they are from each other."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.controlplane.simulator.summary import quantile

JUDGED = ("ttft_p50_s", "ttft_p90_s", "tokens_per_s")
"""Metrics by which a prediction is judged."""


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
