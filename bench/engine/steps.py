"""Steps of a model runner as the scheduler makes them: decodes first, then a chunk of a prompt; and their times."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.core.sampling import SamplingParams
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling

_TOKEN = 5
_GREEDY = ChoiceSampling(SamplingParams(max_tokens=1, temperature=0.0), 0, ())
_CALM_S, _FEWEST, _WARMING = 0.5, 3, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A chunk of `tokens` behind `context` others, and one token for each of `batch` sequences of `batch_context`.
    One of the two may be missing (0)."""

    tokens: int = 0
    context: int = 0
    batch: int = 0
    batch_context: int = 0

    @property
    def kind(self) -> str:
        """The calibration's kind of row for it."""
        if self.tokens and self.batch:
            return "mixed_steps"
        return "prefill_steps" if self.tokens else "decode_steps"

    def row(self, seconds: float) -> dict[str, Any]:
        """In the form of `tandem.controlplane.simulator.fit_measurements`."""
        chunk = {"tokens": self.tokens, "context": self.context} if self.tokens else {}
        if not self.batch:
            return {**chunk, "s": seconds}
        context = "batch_context" if self.tokens else "context"
        return {**chunk, "batch": self.batch, context: self.batch_context, "s": seconds}


def shapes(tokens: Sequence[int], contexts: Sequence[int], batches: Sequence[int]) -> Iterator[Shape]:
    """Every chunk behind nothing and behind each context, every batch at each context, and some of both in one step."""
    for size, context in itertools.product(tokens, (0, *contexts)):
        yield Shape(tokens=size, context=context)
    for batch, context in itertools.product(batches, contexts):
        yield Shape(batch=batch, batch_context=context)
    for size, batch in itertools.product(_some(tokens), _some(batches)):
        yield Shape(tokens=size, batch=batch, batch_context=contexts[0])


def longest(every: Sequence[Shape]) -> int:
    """Tokens of the longest sequence in any of them."""
    return max(max(one.tokens + one.context, one.batch_context) for one in every)


def blocks_needed(every: Sequence[Shape], block_tokens: int) -> int:
    """Blocks of a pool that has room for each of them by itself."""
    return max(
        -(-(one.tokens + one.context) // block_tokens) + one.batch * -(-one.batch_context // block_tokens)
        for one in every
    )


def measure(runner: ModelRunner, shape: Shape) -> float:
    """Median seconds of such a step with its greedy tokens; on a CPU in thread time, which other load disturbs
    little."""
    batch = batch_of(runner, shape)
    rows = [SampleRow(row=place, index=0, sampling=_GREEDY) for place in range(len(batch.logit_rows))]
    is_cuda = runner.device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.thread_time
    return _median_s(functools.partial(runner.step, batch, rows), clock)


def _median_s(step: Callable[[], object], clock: Callable[[], float]) -> float:
    """Its tokens are on the host when a step returns, so that a device has ended, too."""
    for _ in range(_WARMING):
        step()
    times: list[float] = []
    while len(times) < _FEWEST or sum(times) < _CALM_S:
        started_s = clock()
        step()
        times.append(clock() - started_s)
    return statistics.median(times)


def batch_of(runner: ModelRunner, shape: Shape) -> StepBatch:
    """Every sequence in blocks of its own. A chunk ends its prompt, so that its last row has logits."""
    spec, first = runner.layout.groups[0], 0
    sequences: list[SeqSlice] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    parts = [(1, shape.batch_context)] * shape.batch
    parts += [(shape.tokens, shape.context + shape.tokens)] if shape.tokens else []
    for query, context in parts:
        blocks = spec.blocks_for(context)
        sequences.append(SeqSlice(query, context, (range(first, first + blocks),)))
        positions += range(context - query, context)
        logit_rows.append(len(positions) - 1)
        first += blocks
    return StepBatch([_TOKEN] * len(positions), positions, sequences, logit_rows)


def _some(values: Sequence[int]) -> Sequence[int]:
    """The second and the last but one, if there are so many."""
    return sorted({values[min(1, len(values) - 1)], values[max(0, len(values) - 2)]})


def one_thread() -> None:
    """Use one thread, as a worker with `threads = 1`."""
    torch.set_num_threads(1)
