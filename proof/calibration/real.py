"""A real cluster on loopback that gets a run's requests when they are due."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load import Due, TimedAnswer, check_served, offer
from proof.calibration.engines import Engine
from proof.calibration.runs import LEAD, Run, Served, figures
from tandem.controlplane.simulator.traces import RequestLog
from tools.running_cluster import Cluster, running
from tools.waiting import wait_for

TIMEOUT_S = 300.0
_COUNTERS = ("steps", "step_seconds", "prefill_tokens", "decode_tokens", "preemptions")


def play(engine: Engine, run: Run, trace: RequestLog) -> dict[str, Any]:
    """Start the cluster, offer the requests; returns figures, and the workers' counts. SystemExit if a request
    fails."""
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        flags = [*engine.flags(Path(folder)), "--disaggregation", run.way.disaggregation.value]
        split = run.way.workers
        for role, count in (("prefill", split.prefill), ("decode", split.decode), ("mixed", split.mixed)):
            flags += [f"--{role}", str(count)] if count else []
        with running(*flags) as cluster:
            before = _all_there(cluster, split.total)
            plan = [
                Due(one.arrival_s, engine.body(number, one.prompt_tokens, one.output_tokens))
                for number, one in enumerate(trace.requests)
            ]
            answers = asyncio.run(offer(cluster.api, plan, TIMEOUT_S))
            check_served(answers)
            workers = _worked(cluster, before, trace)
    return {
        "requests": len(trace.requests) - LEAD,
        "rate": len(trace.requests[LEAD:]) / (trace.span_s - trace.requests[LEAD].arrival_s),
        "figures": figures(served(trace, answers)),
        "late_s": max(answer.sent_s - answer.due_s for answer in answers),
        "workers": workers,
    }


def _all_there(cluster: Cluster, count: int) -> dict[str, dict[str, float]]:
    """Counts of every worker so far; a cluster serves as soon as the router knows one that can."""

    def known() -> bool:
        rows = cluster.status()["workers"]
        return len(rows) == count and all("counters" in row for row in rows)

    wait_for(known, what="every worker has reported")
    return _counted(cluster)


def served(trace: RequestLog, answers: Sequence[TimedAnswer]) -> list[Served]:
    """The counted requests. An answer's last moment is that of its last token, in any grouping of events."""
    start_s = answers[0].due_s - trace.requests[0].arrival_s
    return [
        Served(
            arrival_s=request.arrival_s, first_s=answer.token_s[0] - start_s, last_s=answer.token_s[-1] - start_s,
            output_tokens=request.output_tokens,
        )
        for answer, request in list(zip(answers, trace.requests, strict=True))[LEAD:]
    ]  # fmt: skip


def _worked(cluster: Cluster, before: dict[str, dict[str, float]], trace: RequestLog) -> dict[str, dict[str, float]]:
    """Counts of every worker since; reports come a moment later than answers. First tokens are their prompts'."""
    prompts = sum(one.prompt_tokens for one in trace.requests)
    answers = sum(one.output_tokens - 1 for one in trace.requests)

    def known() -> dict[str, dict[str, float]] | None:
        after = _counted(cluster)
        worked = {name: {key: now[key] - before[name][key] for key in _COUNTERS} for name, now in after.items()}
        total = {key: sum(one[key] for one in worked.values()) for key in _COUNTERS}
        return worked if total["prefill_tokens"] >= prompts and total["decode_tokens"] >= answers else None

    found: dict[str, dict[str, float]] = wait_for(known, what="workers have counted every token")
    return found


def _counted(cluster: Cluster) -> dict[str, dict[str, float]]:
    rows = cluster.status()["workers"]
    return {row["worker"]: {key: float(row["counters"].get(key, 0.0)) for key in _COUNTERS} for row in rows}
