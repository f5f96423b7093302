"""An open-loop load on a whole cluster: latencies, throughput and hand-off overhead, beside mixed workers.

Poisson arrivals with a fixed seed; requests are sent when they are due, whatever the cluster does with those before.
The same requests then go to two mixed workers with one thread each on the same cores.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

from bench.load import Due, body_of, check_served, offer
from bench.report import Row, arguments_of, publish, quantile
from tools.running_cluster import running

OVERHEAD_LIMIT_MS = 5.0
TIMEOUT_S = 60.0
PERCENTILES = (50, 90, 99)
SPLIT = ("--prefill", "1", "--decode", "1", "--disaggregation", "always")
MIXED = ("--mixed", "2", "--disaggregation", "never")


def workload(seed: int, requests: int, rate: float) -> list[Due]:
    """Every request: token-id prompts of 32 to 768, answers of 16 to 96 tokens."""
    dice = random.Random(seed)
    at_s, plan = 0.0, []
    for _ in range(requests):
        at_s += dice.expovariate(rate)
        prompt = [dice.randrange(300, 4000) for _ in range(dice.choice((32, 64, 128, 256, 512, 768)))]
        plan.append(Due(at_s, body_of(prompt, dice.choice((16, 32, 64, 96)))))
    return plan


def measure(flags: Sequence[str], seed: int, requests: int, rate: float) -> dict[str, tuple[float, str]]:
    """Start a cluster, warm it up, offer the load; metric → (value, unit)."""
    with running(*flags) as cluster:
        asyncio.run(offer(cluster.api, workload(seed + 1, 10, rate), TIMEOUT_S))
        plan = workload(seed, requests, rate)
        answers = asyncio.run(offer(cluster.api, plan, TIMEOUT_S))
    check_served(answers)
    took_s = max(a.token_s[-1] for a in answers) - (answers[0].due_s - plan[0].at_s)
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
    for percent in PERCENTILES:
        figures[f"{name}_p{percent}"] = (quantile(seconds, percent) * 1000, "ms")


def main() -> int:
    parser = arguments_of("serve", __doc__)
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
