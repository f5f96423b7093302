"""Utilization of the machine by a model's steps: decode and prefill beside read bandwidth, GEMM peak and transformers.

Everything is measured in turns, round by round, so that a machine that gets slower does so for all; medians of rounds.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine import llama
from bench.engine.limits import GemmPeak, ReadBandwidth, quick_dtype
from bench.engine.steps import Shape, batch_of
from bench.report import Row
from tandem.core.memory import freeze_gc
from tandem.core.prefill_queue import attended
from tandem.engine.model_work import ModelWork, model_work
from tandem.engine.request import StepResult
from tandem.engine.runner import ModelRunner

BATCHES, PROMPTS, CONTEXT = (1, 8, 32), (512, 2048), 256
QUANTISED = ("int8", "w8a8", "int4", "w4a16")
_STEP_S = 0.3
"""Seconds of one round of one case; at least one step."""


@dataclass(slots=True, kw_only=True)
class Case:
    """A step, the number of tokens it makes or takes, and the seconds of each round."""

    shape: Shape
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.shape.tokens or self.shape.batch

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def run(self) -> None:
        """One round: the step again and again for a moment, by the clock."""
        times: list[float] = []
        while not times or sum(times) < _STEP_S:
            started = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - started)
        self.seconds.append(statistics.median(times))


def shapes(batches: Sequence[int], prompts: Sequence[int], context: int) -> Iterator[Shape]:
    """Decode of every batch at one context, and every prompt as one chunk."""
    for batch in batches:
        yield Shape(batch=batch, batch_context=context)
    for tokens in prompts:
        yield Shape(tokens=tokens)


def measured(
    model: Path, *, rounds: int, batches: Sequence[int] = BATCHES, prompts: Sequence[int] = PROMPTS,
    context: int = CONTEXT, has_baseline: bool = True, quantised: Sequence[str] = QUANTISED,
) -> list[Row]:  # fmt: skip
    """Rows of one model on the CPU, with the threads that torch has now: in bfloat16, and with quantised weights."""
    every = list(shapes(batches, prompts, context))
    blocks = max(-(-shape.tokens // 16) + shape.batch * -(-shape.batch_context // 16) for shape in every)
    longest = max(context, *prompts)
    runners = {
        kind: ModelRunner(
            model_dir=model, dtype="bfloat16", num_blocks=blocks, max_model_len=longest, quantize=kind
        )
        for kind in ("none", *quantised)
    }  # fmt: skip
    runner, smaller = runners["none"], {kind: _cases(runners[kind], every) for kind in quantised}
    ours = _cases(runner, every)
    theirs = list(_baseline(model, every)) if has_baseline else []
    is_beside = has_baseline and llama.takes(model)
    thirds = [Case(shape=shape, step=step) for shape, step in llama.steps(model, every)] if is_beside else []
    bandwidth, peak = ReadBandwidth(), GemmPeak()
    reads: list[float] = []
    products: list[float] = []
    each = [*ours, *theirs, *thirds, *(case for cases in smaller.values() for case in cases)]
    for warming in each:
        warming.step()
    freeze_gc()  # as a worker does behind its warm-up
    for _ in range(rounds):
        reads.append(bandwidth.measure())
        products.append(peak.measure())
        for case in each:
            case.run()
    gc.unfreeze()
    limits = statistics.median(reads), statistics.median(products)
    work = model_work(runner.config, dtype=runner.dtype, layout=runner.layout)
    name = model.name.removeprefix("bench-")
    rows = [*_rows(name, ours, theirs, work, limits), *_compared(name, ours, thirds, "llama.cpp's")]
    for kind, cases in smaller.items():
        read = model_work(runner.config, dtype=runner.dtype, layout=runner.layout, quantize=kind)
        rows += _quantised_rows(name, kind, cases, ours, read, limits[0])
    return rows


def _cases(runner: ModelRunner, every: Sequence[Shape]) -> list[Case]:
    return [Case(shape=shape, step=functools.partial(runner.forward, batch_of(runner, shape))) for shape in every]


def _baseline(model: Path, every: Sequence[Shape]) -> Iterator[Case]:
    """The same steps by transformers, with its own cache: in float32 where torch takes minutes for bfloat16."""
    from bench.model_step.__main__ import Baseline

    baseline = Baseline(model, str(quick_dtype()).removeprefix("torch."), "cpu")
    for shape in every:
        if shape.tokens:
            yield Case(shape=shape, step=baseline.prefill_step(shape.tokens))
        else:
            yield Case(shape=shape, step=baseline.decode_step(shape.batch, shape.batch_context))


def _rows(
    name: str, ours: Sequence[Case], theirs: Sequence[Case], work: ModelWork, limits: tuple[float, float]
) -> Iterator[Row]:
    bandwidth, peak = limits
    yield Row(name, "read bandwidth", bandwidth / 1e9, "GB/s")
    yield Row(name, "GEMM peak", peak / 1e9, "GFLOP/s")
    alone = next(case for case in ours if case.shape.batch)
    for case in ours:
        result, seconds, what = _result(case.shape), case.median_s, _words(case.shape)
        if case.shape.batch:
            read = work.bytes_read(result) / seconds
            yield Row(name, f"{what}: bytes read, of the bandwidth", read / 1e9, "GB/s", bandwidth / 1e9)
        if case.shape.batch > 1:
            each_s = alone.median_s / alone.tokens
            yield Row(name, f"{what}: tokens, of batch 1's", case.tokens / seconds, "tokens/s", 1 / each_s)
        computed = work.flops(result) / seconds
        yield Row(name, f"{what}: FLOPs, of the peak", computed / 1e9, "GFLOP/s", peak / 1e9)
    yield from _compared(name, ours, theirs, "transformers'")


def _compared(name: str, ours: Sequence[Case], theirs: Sequence[Case], whose: str) -> Iterator[Row]:
    for case, other in zip(ours, theirs, strict=bool(theirs)):
        speeds = case.tokens / case.median_s, other.tokens / other.median_s
        yield Row(name, f"{_words(case.shape)}: tokens, of {whose}", speeds[0], "tokens/s", speeds[1])


def _quantised_rows(
    name: str, kind: str, cases: Sequence[Case], plain: Sequence[Case], work: ModelWork, bandwidth: float
) -> Iterator[Row]:
    """Rows of quantised weights; `work` is that of the smaller weights."""
    for case, other in zip(cases, plain, strict=True):
        what, speeds = f"{kind} {_words(case.shape)}", [one.tokens / one.median_s for one in (case, other)]
        if case.shape.batch:
            read = work.bytes_read(_result(case.shape)) / case.median_s
            yield Row(name, f"{what}: bytes read, of the bandwidth", read / 1e9, "GB/s", bandwidth / 1e9)
        yield Row(name, f"{what}: tokens, of bf16's", speeds[0], "tokens/s", speeds[1])


def speeds(rows: Sequence[Row], what: str) -> dict[str, float]:
    """Tokens a second by precision of the step that is called `what`, of one model's rows."""
    found = {}
    for kind in QUANTISED:
        for row in rows:
            if row.metric == f"{kind} {what}: tokens, of bf16's" and row.limit is not None:
                found["bf16"], found[kind] = row.limit, row.value
    return found


def _words(shape: Shape) -> str:
    return f"prefill of {shape.tokens}" if shape.tokens else f"decode, batch {shape.batch}"


def _result(shape: Shape) -> StepResult:
    """The step loop's result of such a step."""
    if shape.tokens:
        pairs = attended(0, shape.tokens)
        return StepResult(prefill_tokens=shape.tokens, logit_rows=1, context_tokens=shape.tokens, attended=pairs)
    stored = shape.batch * shape.batch_context
    return StepResult(
        decode_tokens=shape.batch, logit_rows=shape.batch, context_tokens=stored, attended=stored - shape.batch / 2
    )
