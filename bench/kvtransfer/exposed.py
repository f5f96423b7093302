"""Exposed time of a transfer: 2,048 tokens of the 135M shape, pushed by layer groups while they are computed.

*Exposed* is what remains until the receiver has verified everything, counted from when the last layer's KV is in the
pool, and again from when the step has ended, with that layer's attention and the head behind it. *Whole* is the time
that all bytes take when nothing is computed meanwhile. Chunks of 512 tokens in four layer groups, the defaults.
Then the same through a whole cluster: time to first token and the gap before the second, beside one mixed worker.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from typing import Any

from bench.kvtransfer.children import Child
from bench.load import TimedAnswer, ask, body_of, check_served
from bench.models import model_135m
from bench.report import Row
from tools.running_cluster import running

TOKENS, CHUNK, LAYER_GROUPS = 2048, 512, 4
BLOCKS = TOKENS // 16
AIM_PERCENT = 25.0
TIMEOUT_S = 120.0


def run(transports: Sequence[str], prompts: int) -> list[Row]:
    """Exposed time for every transport."""
    rows: list[Row] = []
    for transport in transports:
        rows += _streamed(transport, prompts)
    return rows


def _streamed(transport: str, prompts: int) -> list[Row]:
    model = str(model_135m())
    receiver = Child("bench.kvtransfer.ends", role="receiver", transport=transport, spec="135m", host="127.0.0.1")
    sender = Child(
        "bench.kvtransfer.prefilling", transport=transport, model=model, tokens=TOKENS, chunk=CHUNK,
        layer_groups=LAYER_GROUPS, threads=1,
    )  # fmt: skip
    try:
        hello = receiver.answer()
        sender.answer()
        sender.call("connect", endpoints=hello["endpoints"])
        figures: dict[str, list[float]] = {
            "exposed": [],
            "after": [],
            "whole": [],
            "compute": [],
            "alone": [],
            "late": [],
        }
        for turn in range(prompts + 1):
            streamed, seen = _one(sender, receiver, "overlapped", 2 * turn + 1)
            whole, whole_seen = _one(sender, receiver, "afterwards", 2 * turn + 2)
            alone = sender.call("overlapped", number=0, is_pushed=False)
            if not turn:  # links were made, memory was touched
                continue
            figures["exposed"].append(1e3 * (seen - streamed["computed_s"]))
            figures["after"].append(1e3 * max(0.0, seen - streamed["sampled_s"]))
            figures["whole"].append(1e3 * (whole_seen - whole["started_s"]))
            figures["compute"].append(1e3 * (streamed["sampled_s"] - streamed["started_s"]))
            figures["alone"].append(1e3 * (alone["sampled_s"] - alone["started_s"]))
            figures["late"].append(streamed["late_bytes"] / (1 << 20))
            moved = whole["bytes"] / (1 << 20)
    finally:
        sender.close()
        receiver.close()
    at = {name: statistics.median(values) for name, values in figures.items()}
    case = f"{TOKENS} tokens, 135M shape, {transport}"
    return [
        Row(case, "exposed, from the last layer's KV on", at["exposed"], "ms", at["whole"]),
        Row(case, "its share of the whole transfer", 100 * at["exposed"] / at["whole"], "%", AIM_PERCENT),
        Row(case, "exposed, from the end of the step on", at["after"], "ms", at["whole"]),
        Row(case, "bytes that cannot be hidden", at["late"], "MiB", moved),
        Row(case, "prefill while pushing", at["compute"], "ms", at["alone"]),
    ]


def _one(sender: Child, receiver: Child, command: str, number: int) -> tuple[dict[str, Any], float]:
    """One transfer of a prompt; the sender's answer, and when the receiver had verified it."""
    receiver.call("expect", first=number, count=1, blocks=BLOCKS)
    said = sender.call(command, number=number)
    return said, receiver.call("settle", count=1, blocks=BLOCKS)["verified_s"][0]


def run_cluster(prompts: int) -> list[Row]:
    """Time to first token, gap before the second, through router and workers; disaggregated against in place."""
    split = _served(("--prefill", "1", "--decode", "1", "--disaggregation", "always"), prompts)
    mixed = _served(("--mixed", "1", "--disaggregation", "never"), prompts)
    rows = []
    for name, pick in (("time to first token", _first), ("gap before the second token", _second)):
        ours, theirs = (statistics.median(map(pick, answers)) for answers in (split, mixed))
        rows.append(Row(f"{TOKENS} tokens, 135M shape, cluster", name, ours, "ms", theirs))
    rest = [1e3 * gap for answer in split for gap in answer.gaps_s]
    rows.append(Row(f"{TOKENS} tokens, 135M shape, cluster", "later gaps", statistics.median(rest), "ms"))
    return rows


def _first(answer: TimedAnswer) -> float:
    return 1e3 * answer.ttft_s


def _second(answer: TimedAnswer) -> float:
    return 1e3 * answer.second_s


def _served(flags: tuple[str, ...], prompts: int) -> list[TimedAnswer]:
    dice = random.Random(11)
    with running("--model", str(model_135m()), "--threads", "1", "--kv-memory", "256MiB", *flags) as cluster:

        async def one() -> TimedAnswer:
            prompt = [dice.randrange(300, 4000) for _ in range(TOKENS)]
            bias = {"400": 100}  # random weights give tokens that are no whole characters
            now_s = asyncio.get_running_loop().time()
            return await ask(cluster.api, body_of(prompt, 8, "bench-135m", logit_bias=bias), now_s, TIMEOUT_S)

        async def all_of_them() -> list[TimedAnswer]:
            return [await one() for _ in range(prompts + 1)][1:]

        answers = asyncio.run(all_of_them())
    check_served(answers)
    return answers
