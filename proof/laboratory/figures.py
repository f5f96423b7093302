"""The same figures of both sides, and how far they are from each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.controlplane.simulator.summary import quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its client saw it."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int


def figures(served: Sequence[Served], busy_s: Sequence[float]) -> dict[str, float]:
    """Metric → value: seconds and shares."""
    ttft_s = sorted(one.ttft_s for one in served)
    return {
        "hit_rate": sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served),
        "ttft_mean_s": statistics.fmean(ttft_s),
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p90_s": quantile(ttft_s, 0.9),
        "e2e_mean_s": statistics.fmean(one.e2e_s for one in served),
        "prefill_busy_s": statistics.fmean(busy_s),
    }


def errors(real: dict[str, float], virtual: dict[str, float]) -> dict[str, float]:
    """The laboratory's relative errors: too much (+) or too little, as a part of the real value."""
    return {name: (virtual[name] - value) / value if value else 0.0 for name, value in real.items()}
