"""Plots of a load: time to first token by prompt length, latency distributions, arrivals over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem.clusterctl.loadgen.client import TimedAnswer
from tandem.clusterctl.loadgen.results import Slo, tpot_s
from tandem.controlplane.simulator.traces import RequestLog


def save(path: Path, title: str, trace: RequestLog, answers: Sequence[TimedAnswer], slo: Slo) -> None:
    """Save three plots side by side; raises OSError."""
    from matplotlib.figure import Figure  # draws into files and needs no display

    good = [
        (request, answer)
        for request, answer in zip(trace.requests, answers, strict=True)
        if not answer.error and answer.token_s
    ]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    by_prompt, spread, over_time = figure.subplots(1, 3)
    figure.suptitle(title)
    by_prompt.scatter([request.prompt_tokens for request, _ in good], [a.ttft_s * 1000 for _, a in good], s=8)
    by_prompt.set(xlabel="prompt, tokens", ylabel="time to first token, ms", title="by length of prompt")
    tpots = [tpot for _, answer in good if (tpot := tpot_s(answer)) is not None]
    for name, seconds in (("time to first token", [a.ttft_s for _, a in good]), ("time a token after it", tpots)):
        values = sorted(second * 1000 for second in seconds)
        spread.plot(values, [(number + 1) / len(values) for number in range(len(values))], label=name)
    spread.set(xlabel="ms", ylabel="share of requests", title="distributions", xscale="log")
    began_s = min((answer.due_s for answer in answers), default=0.0)
    over_time.plot([a.due_s - began_s for _, a in good], [a.ttft_s * 1000 for _, a in good], ".", markersize=4)
    over_time.set(xlabel="arrived after, s", ylabel="time to first token, ms", title="over time")
    for axes in (by_prompt, over_time):
        if slo.ttft_s:
            axes.axhline(slo.ttft_s * 1000, linestyle="--", label=f"SLO {slo.ttft_s * 1000:g} ms")
    for axes in (by_prompt, spread, over_time):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path)
