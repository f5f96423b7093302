"""A real cluster of sim engines on loopback that gets a run's requests when they are due."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from bench.load import Due, TimedAnswer, ask, body_of, check_served, offer
from proof.laboratory.runs import DECODE, LONG, PREFILL, SHORT, Run, Served, idle_prompts, prompts
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
    plan = [
        Due(request.arrival_s, body_of(prompt, request.output_tokens))
        for request, prompt in zip(trace.requests, prompts(trace), strict=True)
    ]
    with running(config=_config(run)) as cluster:
        idle = asyncio.run(_idle(cluster))
        before_s = _busy_s(cluster)
        answers = asyncio.run(offer(cluster.api, plan, TIMEOUT_S))
        busy_s = tuple(after - before for after, before in zip(_busy_s(cluster), before_s, strict=True))
    check_served(answers)
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

    async def answers_to(tokens: int) -> list[TimedAnswer]:
        bodies = [body_of(prompt, _IDLE_TOKENS) for prompt in idle_prompts(tokens, _IDLE)]
        return [await ask(cluster.api, body, time.monotonic(), TIMEOUT_S) for body in bodies]

    short, long = await answers_to(SHORT), await answers_to(LONG)
    worker = cluster.status()["workers"][0]
    answers = short[_WARMING:]
    return Idle(
        short_s=statistics.median(answer.ttft_s for answer in answers),
        long_s=statistics.median(answer.ttft_s for answer in long[_WARMING:]),
        step_s=statistics.median(gap for answer in answers for gap in answer.gaps_s),
        kv_tokens=worker["num_blocks"][0] * worker["block_tokens"],
    )


def _busy_s(cluster: Cluster) -> tuple[float, ...]:
    workers = sorted(cluster.status()["workers"], key=lambda worker: str(worker["worker"]))
    return tuple(worker["counters"].get("step_seconds", 0.0) for worker in workers if worker["role"] != "decode")
