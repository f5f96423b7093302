"""An open-loop load on a whole cluster: latencies, throughput and hand-off overhead, beside mixed workers.

Poisson arrivals with a fixed seed; requests are sent when they are due, whatever the cluster does with those before.
The same requests then go to two mixed workers with one thread each on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.report import Row, publish
from bench.serve.client import Answer, complete
from tools.running_cluster import Cluster, running

OVERHEAD_LIMIT_MS = 5.0
TIMEOUT_S = 60.0
PERCENTILES = (50, 90, 99)
SPLIT = ("--prefill", "1", "--decode", "1", "--disaggregation", "always")
MIXED = ("--mixed", "2", "--disaggregation", "never")


def workload(seed: int, requests: int, rate: float) -> list[tuple[float, dict[str, Any]]]:
    """(seconds after start, body) of every request: token-id prompts of 32 to 768, answers of 16 to 96 tokens."""
    dice = random.Random(seed)
    at_s, plan = 0.0, []
    for _ in range(requests):
        at_s += dice.expovariate(rate)
        body = {
            "model": "tandem-tiny",
            "prompt": [dice.randrange(300, 4000) for _ in range(dice.choice((32, 64, 128, 256, 512, 768)))],
            "max_tokens": dice.choice((16, 32, 64, 96)),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        plan.append((at_s, body))
    return plan


async def offer(cluster: Cluster, plan: Sequence[tuple[float, dict[str, Any]]]) -> tuple[list[Answer], float]:
    """Send every request when it is due; all answers and the seconds from the first to the last token."""
    url = urlsplit(cluster.api)
    assert url.hostname is not None
    assert url.port is not None
    start_s = time.monotonic() + 0.1
    answers: list[Answer] = []

    async def one(at_s: float, body: dict[str, Any]) -> None:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        answers.append(await complete(str(url.hostname), int(url.port or 0), body, start_s + at_s, TIMEOUT_S))

    async with asyncio.TaskGroup() as tasks:
        for at_s, body in plan:
            tasks.create_task(one(at_s, body))
    return answers, time.monotonic() - start_s


def measure(flags: Sequence[str], seed: int, requests: int, rate: float) -> dict[str, tuple[float, str]]:
    """Start a cluster, warm it up, offer the load; metric → (value, unit)."""
    with running(*flags) as cluster:
        asyncio.run(offer(cluster, workload(seed + 1, 10, rate)))
        answers, took_s = asyncio.run(offer(cluster, workload(seed, requests, rate)))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {requests} requests failed, the first with: {failed[0]}")
    figures: dict[str, tuple[float, str]] = {}
    _spread(figures, "ttft", [a.ttft_s for a in answers])
    _spread(figures, "second_token", [a.second_s for a in answers])
    _spread(figures, "itl", [gap for a in answers for gap in a.gaps_s])
    figures["output_tokens_per_s"] = (sum(len(a.token_s) for a in answers) / took_s, "tok/s")
    handoffs = [a.timing["handoff"] for a in answers if a.timing and a.timing.get("handoff")]
    if handoffs:
        for part in ("overhead_s", "ticket_wait_s", "sample_to_step_s", "last_wire_s", "step_rest_s"):
            _spread(figures, f"handoff_{part.removesuffix('_s')}", [h[part] for h in handoffs])
    return figures


def _spread(figures: dict[str, tuple[float, str]], name: str, seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    for percent in PERCENTILES:
        figures[f"{name}_p{percent}"] = (cuts[percent - 1] * 1000, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.serve", description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    load = (arguments.seed, arguments.requests, arguments.rate)
    print(f"{arguments.requests} requests at {arguments.rate}/s, seed {arguments.seed}; 1 prefill + 1 decode worker")
    split = measure(SPLIT, *load)
    print("the same load on 2 mixed workers")
    mixed = measure(MIXED, *load)
    rows = []
    for metric, (value, unit) in split.items():
        limit = OVERHEAD_LIMIT_MS if metric == "handoff_overhead_p50" else mixed.get(metric, (None, ""))[0]
        rows.append(Row("1P1D", metric, value, unit, limit))
    rows += [Row("2 mixed", metric, value, unit) for metric, (value, unit) in mixed.items()]
    publish("serve", rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
