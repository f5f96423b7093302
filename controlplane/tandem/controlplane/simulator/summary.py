"""Summary of a run in a few figures: hits, latencies, waits, how even the load was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.controlplane.simulator.simulated_request import Record
from tandem.controlplane.simulator.simulator import Outcome
from tandem.core.config import SloSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Seconds, and shares from 0 to 1. `hit_rate`: prompt tokens that the computing worker need not compute;
    `predicted_rate`: the router's forecast of that; `saved_rate`: prompt tokens that were not moved.

    `max_wait_s`: longest time from arrival to the first chunk. `imbalance`: busy seconds of the busiest worker that
    computes prompts over those of the least busy one; `spread`: over their mean. `waiting_share`: requests without a
    first token when the last one arrived.
    """

    requests: int
    rate: float
    hit_rate: float
    predicted_rate: float
    saved_rate: float
    fetched_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    max_ttft_s: float
    max_wait_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    imbalance: float
    spread: float
    prefill_busy: float
    decode_busy: float
    preemptions: int
    waiting_share: float


def figures(outcome: Outcome) -> Summary:
    """Return the figures of one run, over all of its requests."""
    records, span_s = outcome.records, max(outcome.ended_s, 1e-9)
    prompt_tokens = sum(r.prompt_tokens for r in records)
    ttft_s = sorted(r.ttft_s for r in records)
    tpot_s = sorted(r.tpot_s for r in records if r.output_tokens > 1) or [0.0]
    computing = [w.busy_s for w in outcome.work if w.role != "decode"] or [w.busy_s for w in outcome.work]
    decoding = [w.busy_s for w in outcome.work if w.role != "prefill"] or [0.0]
    mean_s = sum(computing) / len(computing)
    return Summary(
        requests=len(records),
        rate=outcome.trace.rate,
        hit_rate=sum(r.cached_tokens for r in records) / prompt_tokens,
        predicted_rate=sum(r.predicted_tokens for r in records) / prompt_tokens,
        saved_rate=sum(r.skipped_tokens for r in records) / prompt_tokens,
        fetched_rate=sum(r.fetched_tokens for r in records) / prompt_tokens,
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p90_s=quantile(ttft_s, 0.9),
        ttft_p99_s=quantile(ttft_s, 0.99),
        ttft_mean_s=sum(ttft_s) / len(ttft_s),
        max_ttft_s=ttft_s[-1],
        max_wait_s=max(r.wait_s for r in records),
        tpot_p50_s=quantile(tpot_s, 0.5),
        tpot_p99_s=quantile(tpot_s, 0.99),
        imbalance=max(computing) / min(computing) if min(computing) > 0 else float("inf"),
        spread=max(computing) / mean_s if mean_s else 1.0,
        prefill_busy=mean_s / span_s,
        decode_busy=sum(decoding) / len(decoding) / span_s,
        preemptions=sum(r.preemptions for r in records),
        waiting_share=outcome.waiting / len(records),
    )


def attained(records: Sequence[Record], promise: SloSection) -> float:
    """Return the share of the requests that keep both promises; 0 of a promise = nothing was promised."""
    return sum(keeps(one, promise) for one in records) / len(records) if records else 0.0


def keeps(one: Record, promise: SloSection) -> bool:
    """True if its first token came in time, and so did, on average, the others."""
    is_late = promise.ttft_s and one.ttft_s > promise.ttft_s
    is_slow = promise.itl_s and one.output_tokens > 1 and one.tpot_s > promise.itl_s
    return not (is_late or is_slow)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
