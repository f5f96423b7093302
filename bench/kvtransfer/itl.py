"""Inter-token latency of running answers on D while it receives at full rate, beside the same D left alone.

Two processes work: P, which does nothing but send, and D, which decodes in one thread and receives in others. P is
held to the first core. With three cores or more D has the two next to it (one for steps, one to spare for receiving);
with two it may use both, so that P's sending and D's receiving share what D's steps leave. Idle and busy spells take
turns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.kvtransfer import pools
from bench.kvtransfer.children import Child
from bench.kvtransfer.transports import quantile
from bench.report import Row

AIM = 1.25
STEP_S = 0.010
ANSWERS = 8
TRANSFER_BYTES = 16 << 20
TURNS = 5


def run(transports: Sequence[str], seconds: float) -> list[Row]:
    """Rows of every transport."""
    return [row for transport in transports for row in _rows(transport, seconds)]


def _rows(transport: str, seconds: float) -> list[Row]:
    cores = sorted(os.sched_getaffinity(0))
    ours = cores[1:3] if len(cores) > 2 else cores
    blocks = TRANSFER_BYTES // pools.SQUARE.block_bytes()
    options: dict[str, Any] = {
        "transport": transport,
        "spec": "square",
        "host": "127.0.0.1",
        "step_s": STEP_S,
        "answers": ANSWERS,
    }
    receiver = Child("bench.kvtransfer.decoding", prefix=_on(ours), role="receiver", **options)
    sender = Child("bench.kvtransfer.ends", prefix=_on(cores[:1]), role="sender", **options)
    idle: list[float] = []
    busy: list[float] = []
    received = spent_s = step_s = 0.0
    try:
        hello = receiver.answer()
        sender.answer()
        sender.call("connect", endpoints=hello["endpoints"], bare_address=hello["bare"])
        rate, number = 2e9, 1
        for turn in range(TURNS + 1):
            alone = receiver.call("decode", seconds=seconds)
            count = max(4, round(seconds * rate / TRANSFER_BYTES))
            receiver.call("expect", first=number, count=count, blocks=blocks)
            sender.begin("send", first=number, count=count, blocks=blocks, at_once=4)
            beside = receiver.call("decode", seconds=seconds)
            sent = sender.answer()
            receiver.call("settle", count=count, blocks=blocks)
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
    case = f"{transport}, {ANSWERS} answers, steps of {1e3 * STEP_S:.0f} ms; P on core {cores[0]}, D on {_names(ours)}"
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
