"""Capacity of this core in streams a second, and the effect of half or twice as many offered."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.report import Row
from bench.router.client import Answer, Due, Load

FIRST_RATE = 40.0
"""First offered rate, in streams a second."""
STEP = 1.35
"""Ratio between the rates that are tried."""
KEEPS_UP = 0.97
"""A target that serves this part of the offered streams is below its capacity."""
WARM_S = 1.5

Make = Callable[[], bytes]


class Target(Protocol):
    """Something that serves streams over HTTP from one core, in answers of a token every `step_ms`."""

    @property
    def port(self) -> int: ...
    @property
    def step_ms(self) -> float: ...

    def router_cpu_s(self) -> float:
        """Processor seconds so far."""


@dataclass(frozen=True, slots=True)
class Served:
    """Result of `offered` streams a second, once as many ran as ever would: `rate` streams a second were served, for
    `cpu_ms` of processor time each. `refused`: rejected requests."""

    offered: float
    rate: float
    cpu_ms: float
    refused: int
    answers: Sequence[Answer]


def steady(kind: str, make: Make, rate: float, seconds: float, tokens: int) -> list[Due]:
    """Requests at even distances."""
    return [Due(number / rate, kind, make(), tokens) for number in range(int(rate * seconds))]


def serve(target: Target, make: Make, rate: float, seconds: float, tokens: int) -> Served:
    """Offer `rate` streams a second and look at `seconds` of it."""
    begin_s = target.step_ms / 1e3 * tokens + WARM_S
    plan = steady("load", make, rate, begin_s + seconds, tokens)
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.monotonic(), target.router_cpu_s()))

    load = Load(target.port, timeout_s=60.0, may_refuse=True)
    gc.disable()
    try:
        answers = load.run(plan, [(begin_s, mark), (begin_s + seconds, mark)])
    finally:
        gc.enable()
        load.close()
    (from_s, from_cpu_s), (to_s, to_cpu_s) = marks
    ended = sum(from_s <= answer.last_s < to_s and not answer.is_refused for answer in answers)
    served = ended / (to_s - from_s)
    cpu_ms = 1e3 * (to_cpu_s - from_cpu_s) / max(1, ended)
    print(f"  {rate:.0f} offered: {served:.0f} served, {cpu_ms:.2f} ms of CPU a stream", flush=True)
    return Served(rate, served, cpu_ms, sum(answer.is_refused for answer in answers), answers)


def capacity(target: Target, make: Make, seconds: float, tokens: int) -> float:
    """The most streams a second that were served, of rates that go up until not all of a rate is served."""
    best, rate = 0.0, FIRST_RATE
    while True:
        found = serve(target, make, rate, seconds, tokens)
        best = max(best, found.rate)
        if found.rate < KEEPS_UP * rate:
            break
        rate *= STEP
    between = serve(target, make, rate / STEP**0.5, seconds, tokens)
    return max(best, between.rate)


def overload(
    case: str, target: Target, peer: Target | None, make: Make, seconds: float, tokens: int, turns: int = 3
) -> tuple[float, list[Row]]:
    """The capacity, and rows of half and twice as much; `peer` takes turns at half of it."""
    most = capacity(target, make, seconds, tokens)
    halves, peers, twices = [], [], []
    for _ in range(turns):
        halves.append(serve(target, make, most / 2, seconds, tokens))
        if peer is not None:
            peers.append(serve(peer, make, most / 2, seconds, tokens).cpu_ms)
        twices.append(serve(target, make, 2 * most, seconds, tokens))
    half_ms = statistics.median(one.cpu_ms for one in halves)
    peer_ms = statistics.median(peers) if peers else None
    refused = sum(one.refused for one in twices) / sum(len(one.answers) for one in twices)
    twice = f"{case}, twice that"
    return most, [
        Row(case, "streams a second, the most served", most, "1/s"),
        Row(case, "tokens a second, the most served", most * tokens, "1/s"),
        Row(f"{case}, half of that", "CPU a stream; limit: sglang-router's", half_ms, "ms", peer_ms),
        Row(twice, "streams a second, served", statistics.median(one.rate for one in twices), "1/s", most),
        Row(twice, "CPU a stream; limit: at half", statistics.median(one.cpu_ms for one in twices), "ms", half_ms),
        Row(twice, "refused, of all", 100 * refused, "%"),
    ]
