"""The runs: part of the trace, speed, policy and queue, the same for both sides; and the figures that both give."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.controlplane.simulator.summary import quantile
from tandem.controlplane.simulator.traces import RequestLog, TraceRequest
from tandem.core.config import PolicyName, SimSection, WorkerSection
from tandem.core.prefill_queue import QueueRules

SHRUNK = 32
"""Prompts, answers and blocks are so many times shorter: a trace's block of 512 tokens is one of 16."""
PREFILL, DECODE = 2, 2
WORKER = WorkerSection(
    engine="sim",
    kv_memory_bytes=64 * 1024 * 1024,
    sim=SimSection(prefill_tokens_per_s=800.0, decode_step_s=0.02, decode_sequence_s=0.001),
)
SHORT, LONG = 64, 704
"""Tokens of the prompts that an idle cluster is measured with."""
_FIRST_TOKEN, _LAST_TOKEN = 300, 4000
"""Ids that are text in the bundled model's vocabulary."""
_APART_S = 0.01
"""Distance of requests that the trace has at one moment: its times are rounded to 3 s, and the order in which a router
reads ten of one moment is chance, which moves the median time to a first token by a fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run. `from_s`: its start in the trace."""

    policy: PolicyName
    is_fifo: bool
    from_s: float

    @property
    def name(self) -> str:
        return f"{self.policy.value}+{'fifo' if self.is_fifo else 'srf'} from {self.from_s:g} s"

    @property
    def worker(self) -> WorkerSection:
        """Settings of every worker."""
        return dataclasses.replace(WORKER, queue_stretch=0.0) if self.is_fifo else WORKER

    @property
    def queue(self) -> QueueRules:
        return QueueRules(stretch=self.worker.queue_stretch, max_overtake_s=self.worker.queue_max_overtake_s)


RUNS = (
    Run(policy=PolicyName.COST, is_fifo=False, from_s=0.0),
    Run(policy=PolicyName.COST, is_fifo=True, from_s=600.0),
    Run(policy=PolicyName.LEAST_LOADED, is_fifo=True, from_s=1200.0),
    Run(policy=PolicyName.DYNAMO, is_fifo=True, from_s=1800.0),
    Run(policy=PolicyName.COST, is_fifo=False, from_s=2400.0),
)

SHIFT_S = 600.0
"""Most that a seed moves the start of a run."""


def shifted(runs: Sequence[Run], seed: int) -> tuple[Run, ...]:
    """The same runs with other parts of the trace; 0 leaves them as they are."""
    shift_s = round(random.Random(seed).uniform(0.0, SHIFT_S)) if seed else 0
    return tuple(dataclasses.replace(run, from_s=run.from_s + shift_s) for run in runs)


def part(trace: RequestLog, run: Run, *, scale: float, seconds: float, max_tokens: int) -> RequestLog:
    """The requests of one run, the first at 0 s, shrunk, one after the other. Those longer than `max_tokens` with their
    answer are cut."""
    end_s = run.from_s + seconds * scale
    kept = tuple(r for r in trace.requests if run.from_s <= r.arrival_s < end_s)
    moved = (dataclasses.replace(r, arrival_s=(r.arrival_s - run.from_s) / scale) for r in kept)
    shrunk = dataclasses.replace(trace, requests=tuple(moved)).shrunk(SHRUNK)
    cut = (
        dataclasses.replace(r, prompt_tokens=min(r.prompt_tokens, max_tokens - r.output_tokens))
        for r in shrunk.requests
    )
    return dataclasses.replace(shrunk, requests=tuple(_apart(cut)))


def _apart(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """In the trace's order, those of one moment `_APART_S` after each other."""
    for _, group in itertools.groupby(requests, key=lambda r: r.arrival_s):
        for number, request in enumerate(group):
            yield dataclasses.replace(request, arrival_s=request.arrival_s + number * _APART_S)


def prompts(trace: RequestLog) -> list[list[int]]:
    """Token ids for every request; equal block ids are equal tokens."""
    return [_prompt(number, request, trace.block_tokens) for number, request in enumerate(trace.requests)]


def _prompt(number: int, request: TraceRequest, block_tokens: int) -> list[int]:
    if not request.blocks:
        return _tokens(f"request {number}", request.prompt_tokens)
    found = [token for block in request.blocks for token in _tokens(f"block {block}", block_tokens)]
    return found[: request.prompt_tokens]


def _tokens(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


def idle_prompts(tokens: int, count: int) -> Sequence[list[int]]:
    """Prompts that share nothing, for an idle cluster."""
    return [_tokens(f"idle {tokens} {number}", tokens) for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as its client saw it."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int


def figures(served: Sequence[Served], busy_s: Sequence[float]) -> dict[str, float]:
    """Metric → value: seconds and shares."""
    ttft_s = sorted(one.ttft_s for one in served)
    return {
        "hit_rate": sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served),
        "ttft_mean_s": statistics.fmean(ttft_s),
        "ttft_p50_s": quantile(ttft_s, 0.5),
        "ttft_p90_s": quantile(ttft_s, 0.9),
        "e2e_mean_s": statistics.fmean(one.e2e_s for one in served),
        "prefill_busy_s": statistics.fmean(busy_s),
    }


def errors(real: dict[str, float], virtual: dict[str, float]) -> dict[str, float]:
    """The laboratory's relative errors: too much (+) or too little, as a part of the real value."""
    return {name: (virtual[name] - value) / value if value else 0.0 for name, value in real.items()}
