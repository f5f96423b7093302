"""Results of a load: percentiles, goodput under an SLO, time to first token by prompt length."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.clusterctl.loadgen.client import TimedAnswer
from tandem.controlplane.simulator.traces import RequestLog

PERCENTILES = (50, 90, 95, 99)
_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The promise for each request, in seconds; 0 = none. `itl_s` is for the mean of an answer's gaps.

    `least_share` of all requests had to keep it."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    least_share: float = 0.0

    def is_kept(self, answer: TimedAnswer) -> bool:
        if answer.error or not answer.token_s:
            return False
        if self.ttft_s and answer.ttft_s > self.ttft_s:
            return False
        tpot = tpot_s(answer)
        return not (self.itl_s and tpot is not None and tpot > self.itl_s)


def tpot_s(answer: TimedAnswer) -> float | None:
    """Return the mean seconds for a token after the first; None for an answer of one."""
    if len(answer.token_s) < 2:
        return None
    return (answer.token_s[-1] - answer.token_s[0]) / (len(answer.token_s) - 1)


def report(trace: RequestLog, answers: Sequence[TimedAnswer], slo: Slo) -> dict[str, Any]:
    """Return the figures of a load as plain values. Latencies in seconds, from when a request was due."""
    good = [answer for answer in answers if not answer.error and answer.token_s]
    kept = sum(slo.is_kept(answer) for answer in answers)
    began_s = min(answer.due_s for answer in answers)
    ended_s = max((answer.token_s[-1] for answer in good), default=began_s)
    took_s = max(ended_s - began_s, 1e-9)
    output_tokens = sum(_output_tokens(answer) for answer in good)
    gaps = [gap for answer in good for gap in _gaps(answer)]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": _errors(answers),
        "took_s": _round(took_s),
        "offered_requests_per_s": _round(trace.rate),
        "requests_per_s": _round(len(good) / took_s),
        "output_tokens_per_s": _round(output_tokens / took_s),
        "prompt_tokens": sum(request.prompt_tokens for request in trace.requests),
        "output_tokens": output_tokens,
        "ttft_s": percentiles([answer.ttft_s for answer in good]),
        "tpot_s": percentiles([tpot for answer in good if (tpot := tpot_s(answer)) is not None]),
        "itl_s": percentiles(gaps),
        "e2e_s": percentiles([answer.token_s[-1] - answer.due_s for answer in good]),
        "sent_late_s": percentiles([answer.sent_s - answer.due_s for answer in answers if answer.sent_s]),
        "ttft_by_prompt": _by_prompt(trace, answers),
        "slo": {
            "ttft_s": slo.ttft_s,
            "itl_s": slo.itl_s,
            "least_share": slo.least_share,
            "share": _round(kept / len(answers)),
            "goodput_requests_per_s": _round(kept / took_s),
            "is_met": kept / len(answers) >= slo.least_share,
        },
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return mean, PERCENTILES and maximum; None without values."""
    if not seconds:
        return None
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 99
    found = {f"p{percent}": _round(cuts[percent - 1]) for percent in PERCENTILES}
    return {"mean": _round(statistics.fmean(seconds)), **found, "max": _round(max(seconds))}


def _by_prompt(trace: RequestLog, answers: Sequence[TimedAnswer]) -> list[dict[str, Any]]:
    """Return one row for each range of prompt lengths: up to so many tokens, more than the row before."""
    rows: dict[int, list[float]] = {}
    for request, answer in zip(trace.requests, answers, strict=True):
        if not answer.error and answer.token_s:
            bucket = next((most for most in _BUCKETS if request.prompt_tokens <= most), request.prompt_tokens)
            rows.setdefault(bucket, []).append(answer.ttft_s)
    return [
        {"prompt_tokens": bucket, "requests": len(seconds), "ttft_s": percentiles(seconds)}
        for bucket, seconds in sorted(rows.items())
    ]


def _errors(answers: Sequence[TimedAnswer]) -> list[dict[str, Any]]:
    """Return the ten most frequent, shortened."""
    counts = Counter(
        (answer.error or "no token came")[:200] for answer in answers if answer.error or not answer.token_s
    )
    return [{"error": error, "requests": count} for error, count in counts.most_common(10)]


def _output_tokens(answer: TimedAnswer) -> int:
    said = (answer.usage or {}).get("completion_tokens")
    return int(said) if said else len(answer.token_s)


def _gaps(answer: TimedAnswer) -> list[float]:
    return [b - a for a, b in zip(answer.token_s, answer.token_s[1:], strict=False)]


def _round(value: float) -> float:
    return round(value, 6)
