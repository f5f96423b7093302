"""Overload on sim workers: what is still served as promised at twice the capacity, and what a flood does to others.

One prefill worker that takes 50 ms a prompt and one decode worker, as a whole cluster. Capacity is measured first, by
clients that send one request after the other. Then come Poisson arrivals with a fixed seed, sent when due: twice the
capacity in one SLO class; and two tenants, each with half of the capacity as its share, one of which sends half of its
share, the other its share, then ten times that. Latencies count from when a request was due.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.load import Due, TimedAnswer, ask, body_of, check_served, offer
from bench.report import Row, arguments_of, publish, quantile
from tools.running_cluster import Cluster, running

TTFT_S, ITL_S = 1.0, 0.1
PROMPT_TOKENS, ANSWER_TOKENS = 100, 8
GOODPUT_LIMIT, P99_LIMIT = 0.9, 1.2
TIMEOUT_S = 30.0
CLASS = {"X-SLO-Class": "chat"}
CONFIG = f"""
[pools]
prefill = 1
decode = 1
[router]
anonymous = "always"
disaggregation = "always"
[worker]
engine = "sim"
[worker.sim]
prefill_tokens_per_s = 2000.0
decode_step_s = 0.005
[slo.chat]
ttft_s = {TTFT_S}
itl_s = {ITL_S}
"""


@dataclass(frozen=True, slots=True)
class Stream:
    """Arrivals of one tenant."""

    rate: float
    seed: int
    headers: Mapping[str, str]


class Load:
    """Sends to one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._api, self._words = cluster.api, random.Random(0)

    def _body(self) -> dict[str, Any]:
        return body_of([self._words.randrange(300, 4000) for _ in range(PROMPT_TOKENS)], ANSWER_TOKENS)

    async def capacity(self, clients: int, seconds: float) -> float:
        """Requests a second that end while every client always has one."""
        began_s = time.monotonic()
        ends_s: list[float] = []

        async def one() -> None:
            while time.monotonic() < began_s + seconds:
                check_served([await ask(self._api, self._body(), time.monotonic(), TIMEOUT_S)])
                ends_s.append(time.monotonic())

        await asyncio.gather(*(one() for _ in range(clients)))
        counted = [end_s for end_s in ends_s if began_s + 2.0 <= end_s < began_s + seconds]
        return len(counted) / (seconds - 2.0)

    async def offer(self, streams: Sequence[Stream], seconds: float) -> list[list[TimedAnswer]]:
        """All answers of each stream. Nothing of their prompts is cached."""
        due: list[tuple[float, int]] = []
        for number, stream in enumerate(streams):
            dice, at_s = random.Random(stream.seed), 0.0
            while (at_s := at_s + dice.expovariate(stream.rate)) < seconds:
                due.append((at_s, number))
        due.sort()
        answers = await offer(self._api, [Due(at_s, self._body(), streams[n].headers) for at_s, n in due], TIMEOUT_S)
        return [[a for a, (_, n) in zip(answers, due, strict=True) if n == number] for number in range(len(streams))]


def key(cluster: Cluster, tenant: str) -> dict[str, str]:
    """Headers of a new key."""
    return {"Authorization": f"Bearer {cluster.admin('/admin/v1/keys', {'tenant': tenant, 'slo': 'chat'})['key']}"}


def is_met(answer: TimedAnswer) -> bool:
    if answer.error or answer.ttft_s > TTFT_S:
        return False
    return (answer.token_s[-1] - answer.token_s[0]) / max(1, len(answer.token_s) - 1) <= ITL_S


def p99_ms(answers: Sequence[TimedAnswer]) -> float:
    served = [answer.ttft_s for answer in answers if not answer.error]
    return quantile(served, 99) * 1000


def refused(answers: Sequence[TimedAnswer]) -> int:
    """Return the number of rejected answers; ends the measurement if any failed in another way."""
    check_served(answers, allowed=" 503 ")
    return sum(bool(answer.error) for answer in answers)


def measure(seconds: float) -> list[Row]:
    with running(config=CONFIG) as cluster:
        return asyncio.run(_phases(cluster, seconds))


async def _phases(cluster: Cluster, seconds: float) -> list[Row]:
    load = Load(cluster)
    await load.capacity(4, 3.0)
    capacity = await load.capacity(16, 12.0)
    print(f"capacity: {capacity:.1f} requests/s")
    (answers,) = await load.offer([Stream(2 * capacity, 1, CLASS)], seconds / 2)
    goodput = sum(map(is_met, answers)) / (seconds / 2)
    late = sum(not answer.error and not is_met(answer) for answer in answers)
    rows = [
        Row("capacity", "requests", capacity, "/s"),
        Row("twice the capacity", "served as promised", goodput, "/s", capacity),
        Row("twice the capacity", "ttft_p99", p99_ms(answers), "ms", TTFT_S * 1000),
        Row("twice the capacity", "served late", late, "requests", len(answers)),
        Row("twice the capacity", "told to come back", refused(answers), "requests", len(answers)),
    ]
    modest, greedy = await asyncio.to_thread(key, cluster, "modest"), await asyncio.to_thread(key, cluster, "greedy")
    quiet = Stream(capacity / 4, 2, modest)
    before, _ = await load.offer([quiet, Stream(capacity / 2, 3, greedy)], seconds)
    after, flood = await load.offer([quiet, Stream(10 * capacity / 2, 3, greedy)], seconds)
    rows += [
        Row("its share", "other's ttft_p99", p99_ms(before), "ms"),
        Row("its share", "other's refused", refused(before), "requests", len(before)),
        Row("ten times its share", "other's ttft_p99", p99_ms(after), "ms", p99_ms(before)),
        Row("ten times its share", "other's refused", refused(after), "requests", len(after)),
        Row("ten times its share", "its own refused", refused(flood), "requests", len(flood)),
    ]
    return rows


def main() -> int:
    parser = arguments_of("admission", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two phases with two tenants")
    arguments = parser.parse_args()
    rows = measure(arguments.seconds)
    publish("admission", rows, arguments.out)
    found = {(row.case, row.metric): row.ratio or 0.0 for row in rows}
    is_good = found["twice the capacity", "served as promised"] >= GOODPUT_LIMIT
    is_good &= found["ten times its share", "other's ttft_p99"] < P99_LIMIT
    print(
        "as promised" if is_good else f"wanted: at least {GOODPUT_LIMIT} of the capacity, less than {P99_LIMIT} of p99"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
