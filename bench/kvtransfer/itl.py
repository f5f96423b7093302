"""Inter-token latency of running answers on D while it receives at full rate, beside the same D left alone.

Two processes work: P, which does nothing but send, and D, which decodes in one thread and receives in others. P is
held to the first core. Measured twice: D's steps have a core of their own and its receiving another one, which it
shares with P's sending where there are only two; and all of D goes wherever there is room. Idle and busy spells take
turns, and which of them is first as well: answers grow, and with them what a step reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.kvtransfer import pools
from bench.kvtransfer.children import Child
from bench.report import Row, quantile

AIM = 1.25
STEP_S = 0.010
ANSWERS = 8
TRANSFER_BYTES = 16 << 20
TURNS = 6


@dataclass(frozen=True, slots=True)
class Place:
    """Cores of each part; `step_core` None: steps run where receiving does."""

    sending: Sequence[int]
    receiving: Sequence[int]
    step_core: int | None

    @classmethod
    def with_a_spare_core(cls, cores: Sequence[int]) -> Place:
        """Steps have a core of their own; P shares the core of receiving if there is no third."""
        return cls(sending=cores[:1], receiving=cores[2:3] or cores[:1], step_core=cores[1])

    @classmethod
    def anywhere(cls, cores: Sequence[int]) -> Place:
        """Return D's two cores; P shares them on a machine without a third."""
        return cls(sending=cores[:1], receiving=cores[1:3] if len(cores) > 2 else cores, step_core=None)

    def __str__(self) -> str:
        steps = "" if self.step_core is None else f", steps on {self.step_core}"
        return f"P on core {_names(self.sending)}, D on {_names(self.receiving)}{steps}"


def run(transports: Sequence[str], seconds: float) -> list[Row]:
    """Rows of every transport."""
    cores = sorted(os.sched_getaffinity(0))
    places = [Place.with_a_spare_core(cores), Place.anywhere(cores)] if len(cores) > 1 else [Place.anywhere(cores)]
    return [row for transport in transports for place in places for row in _rows(transport, seconds, place)]


def _rows(transport: str, seconds: float, place: Place) -> list[Row]:
    blocks = TRANSFER_BYTES // pools.SQUARE.block_bytes()
    options: dict[str, Any] = {
        "transport": transport,
        "spec": "square",
        "host": "127.0.0.1",
        "step_s": STEP_S,
        "step_core": place.step_core,
        "answers": ANSWERS,
    }
    receiver = Child("bench.kvtransfer.decoding", prefix=_on(place.receiving), role="receiver", **options)
    sender = Child("bench.kvtransfer.ends", prefix=_on(place.sending), role="sender", **options)
    idle: list[float] = []
    busy: list[float] = []
    received = spent_s = step_s = 0.0
    try:
        hello = receiver.answer()
        sender.answer()
        sender.call("connect", endpoints=hello["endpoints"], bare_address=hello["bare"])
        rate, number = 2e9, 1
        for turn in range(TURNS + 1):
            count = max(4, round(seconds * rate / TRANSFER_BYTES))
            alone = receiver.call("decode", seconds=seconds) if turn % 2 else None
            receiver.call("expect", first=number, count=count, blocks=blocks)
            sender.begin("send", first=number, count=count, blocks=blocks, at_once=4)
            beside = receiver.call("decode", seconds=seconds)
            sent = sender.answer()
            receiver.call("settle", count=count, blocks=blocks)
            alone = alone or receiver.call("decode", seconds=seconds)
            number, rate = number + count, 1.1 * count * TRANSFER_BYTES / sent["all_s"]
            if not turn:  # found the rate, and that both are warm
                continue
            idle += alone["gaps_s"]
            busy += beside["gaps_s"]
            step_s = alone["busy_s"]
            received, spent_s = received + count * TRANSFER_BYTES, spent_s + sent["all_s"]
    finally:
        sender.close()
        receiver.close()
    case = f"{transport}, {ANSWERS} answers, steps of {1e3 * STEP_S:.0f} ms; {place}"
    ratio = quantile(busy, 99) / quantile(idle, 99)
    return [
        Row(case, "ITL p50 while receiving", 1e3 * quantile(busy, 50), "ms", 1e3 * quantile(idle, 50)),
        Row(case, "ITL p99 while receiving", 1e3 * quantile(busy, 99), "ms", 1e3 * quantile(idle, 99)),
        Row(case, "ITL p99, times idle", ratio, "x", AIM),
        Row(case, "received meanwhile", received / spent_s / (1 << 30), "GiB/s"),
        Row(case, "a step's own work", 1e3 * step_s, "ms"),
    ]


def _on(cores: Sequence[int]) -> tuple[str, ...]:
    return ("taskset", "-c", ",".join(map(str, cores)))


def _names(cores: Sequence[int]) -> str:
    return " and ".join(map(str, cores))
