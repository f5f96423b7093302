"""Hand-over overhead of the bundled model through a whole cluster, one request at a time and eight.

Each of so many clients asks again as soon as its answer is complete. The parts of the overhead are the cluster's own
timing (`bench/serve` reports the same under an open-loop load).
"""

from __future__ import annotations

import asyncio
import random

from bench.load import TimedAnswer, ask, body_of, check_served
from bench.report import Row, quantile
from tools.running_cluster import Cluster, running

AIMS_MS = {50: 5.0, 99: 25.0}
AT_ONCE = (1, 8)
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 16
TIMEOUT_S = 60.0


def run(requests: int) -> list[Row]:
    """Overhead, its parts, and the client's view of it; `requests` for each number of clients."""
    rows: list[Row] = []
    with running("--prefill", "1", "--decode", "1", "--disaggregation", "always") as cluster:
        _ask(cluster, 8, 16, 0)
        for at_once in AT_ONCE:
            rows += _rows(f"tandem-tiny, {at_once} at once", _ask(cluster, at_once, requests, at_once))
    return rows


def _ask(cluster: Cluster, at_once: int, requests: int, seed: int) -> list[TimedAnswer]:
    dice = random.Random(seed)
    answers: list[TimedAnswer] = []

    async def client(count: int) -> None:
        for _ in range(count):
            prompt = [dice.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
            now_s = asyncio.get_running_loop().time()
            answers.append(await ask(cluster.api, body_of(prompt, OUTPUT_TOKENS), now_s, TIMEOUT_S))

    async def clients() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(client(requests // at_once))

    asyncio.run(clients())
    check_served(answers)
    return answers


def _rows(case: str, answers: list[TimedAnswer]) -> list[Row]:
    timings = [answer.timing["handoff"] for answer in answers if answer.timing and answer.timing.get("handoff")]
    if len(timings) < len(answers):
        raise SystemExit(f"{len(answers) - len(timings)} of {len(answers)} answers were not handed over")
    rows = []
    for percent, aim_ms in AIMS_MS.items():
        value_ms = 1e3 * quantile([timing["overhead_s"] for timing in timings], percent)
        rows.append(Row(case, f"hand-off overhead p{percent}", value_ms, "ms", aim_ms))
    for part in ("ticket_wait_s", "sample_to_step_s", "last_wire_s", "step_rest_s"):
        values = [1e3 * timing[part] for timing in timings]
        rows += [Row(case, f"{part.removesuffix('_s')} p{p}", quantile(values, p), "ms") for p in AIMS_MS]
    gaps = [1e3 * answer.second_s for answer in answers if len(answer.token_s) > 1]
    return [*rows, *(Row(case, f"gap before the second token p{p}", quantile(gaps, p), "ms") for p in AIMS_MS)]
