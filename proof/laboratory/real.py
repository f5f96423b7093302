"""A real cluster of sim engines on loopback that gets a run's requests when they are due."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.load import TimedAnswer, complete
from proof.laboratory.figures import Served
from proof.laboratory.runs import DECODE, LONG, PREFILL, SHORT, Run, idle_prompts, prompts
from tandem.controlplane.simulator.traces import RequestLog
from tools.running_cluster import Cluster, running

TIMEOUT_S = 300.0
_IDLE, _WARMING = 10, 4
_IDLE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Times of an idle cluster: to the first token of a prompt of SHORT and one of LONG tokens, and from token to
    token. `kv_tokens`: tokens that a worker's pool holds."""

    short_s: float
    long_s: float
    step_s: float
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """`busy_s`: seconds in steps, of every worker that computes prompts."""

    idle: Idle
    served: tuple[Served, ...]
    busy_s: tuple[float, ...]


def play(run: Run, trace: RequestLog) -> Real:
    """Start the cluster, measure it idle, offer the requests. SystemExit if one of them fails."""
    with tempfile.TemporaryDirectory(prefix="td-") as folder:
        config = Path(folder) / "cluster.toml"
        config.write_text(_config(run))
        with running("--config", str(config)) as cluster:
            idle = asyncio.run(_idle(cluster))
            before_s = _busy_s(cluster)
            answers = asyncio.run(_offer(cluster, trace))
            busy_s = tuple(after - before for after, before in zip(_busy_s(cluster), before_s, strict=True))
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
    pairs = zip(answers, trace.requests, strict=True)
    served = tuple(
        Served(
            ttft_s=answer.ttft_s, e2e_s=answer.token_s[-1] - answer.due_s, prompt_tokens=request.prompt_tokens,
            cached_tokens=int((answer.timing or {}).get("cached_tokens", 0)),
        )
        for answer, request in pairs
    )  # fmt: skip
    return Real(idle=idle, served=served, busy_s=busy_s)


def _config(run: Run) -> str:
    worker = run.worker
    return f"""
[pools]
prefill = {PREFILL}
decode = {DECODE}
[router]
policy = "{run.policy.value}"
[worker]
engine = "{worker.engine}"
kv_memory_bytes = {worker.kv_memory_bytes}
queue_stretch = {worker.queue_stretch}
queue_max_overtake_s = {worker.queue_max_overtake_s}
[worker.sim]
prefill_tokens_per_s = {worker.sim.prefill_tokens_per_s}
decode_step_s = {worker.sim.decode_step_s}
decode_sequence_s = {worker.sim.decode_sequence_s}
"""


async def _idle(cluster: Cluster) -> Idle:
    """One request after the other; the first ones open streams and measure links."""
    short = [await _ask(cluster, one, _IDLE_TOKENS, time.monotonic()) for one in idle_prompts(SHORT, _IDLE)]
    long = [await _ask(cluster, one, _IDLE_TOKENS, time.monotonic()) for one in idle_prompts(LONG, _IDLE)]
    worker = cluster.status()["workers"][0]
    answers = short[_WARMING:]
    return Idle(
        short_s=statistics.median(answer.ttft_s for answer in answers),
        long_s=statistics.median(answer.ttft_s for answer in long[_WARMING:]),
        step_s=statistics.median(gap for answer in answers for gap in answer.gaps_s),
        kv_tokens=worker["num_blocks"][0] * worker["block_tokens"],
    )


async def _offer(cluster: Cluster, trace: RequestLog) -> Sequence[TimedAnswer]:
    texts, start_s = prompts(trace), time.monotonic() + 0.5

    async def one(number: int) -> TimedAnswer:
        request, due_s = trace.requests[number], start_s + trace.requests[number].arrival_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        return await _ask(cluster, texts[number], request.output_tokens, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(len(texts))]
    return [task.result() for task in tasks]


async def _ask(cluster: Cluster, prompt: Sequence[int], output_tokens: int, due_s: float) -> TimedAnswer:
    url = urlsplit(cluster.api)
    body: dict[str, Any] = {
        "model": "tandem-tiny", "prompt": list(prompt), "max_tokens": output_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    return await complete(str(url.hostname), int(url.port or 0), body, due_s, TIMEOUT_S)


def _busy_s(cluster: Cluster) -> tuple[float, ...]:
    workers = sorted(cluster.status()["workers"], key=lambda worker: str(worker["worker"]))
    return tuple(worker["counters"].get("step_seconds", 0.0) for worker in workers if worker["role"] != "decode")
