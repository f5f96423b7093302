"""The engine on a small random model of each family: logits on the device against the CPU's in fp32, and host gaps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.decode import SHAPES
from bench.gpu.report import Case, Report
from tandem.core.sampling import SamplingParams
from tandem.engine.memory_plan import StepBounds
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import Begun, SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling
from tandem.kernels import backend
from tools.random_model import ARCHITECTURES, RandomModel, make_random_model

TOLERANCE = 5e-3
"""Of logits in fp32: a device computes their products in another order."""
GAP_BATCHES, GAP_CONTEXT, GAP_STEPS = (1, 16, 64), 512, 50
_GREEDY = ChoiceSampling(SamplingParams(max_tokens=1, temperature=0.0), 0, ())


def correctness(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    for family in ("llama",) if rehearsal else sorted(ARCHITECTURES):
        yield f"family {family}", partial(_family, device=device, family=family, rehearsal=rehearsal)


def speed(device: torch.device, *, rehearsal: bool) -> Iterator[Case]:
    """Steps of the engine itself, with the sampler; the difference to the device's time is the host's."""
    yield "host gap", partial(_gap, device=device, rehearsal=rehearsal)


def _family(report: Report, device: torch.device, family: str, rehearsal: bool) -> None:
    """Two prompts, one in chunks, then decodes of both; on a GPU in CUDA graphs and launched anew."""
    lengths, steps = ((5, 9), 1) if rehearsal else ((40, 131), 12)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_random_model(RandomModel(family=family, hidden=64 if rehearsal else 256, vocab=4096, seed=5), folder)
        expected = _logits(_runner(folder, torch.device("cpu"), has_graphs=False), lengths, steps)
        for has_graphs in (False, True) if device.type == "cuda" else (False,):
            runner = _runner(folder, device, has_graphs=has_graphs)
            with _triton_in(device):
                found = _logits(runner, lengths, steps)
            case = f"family {family} {'graphs' if has_graphs else 'launched'}"
            report.add(case, "largest difference of logits", _error(found, expected), "error", TOLERANCE)
            if has_graphs:
                report.add(case, "decode steps are captured", float(runner.has_captured), "of 1")


def _runner(folder: Path, device: torch.device, *, has_graphs: bool) -> ModelRunner:
    return ModelRunner(
        model_dir=folder, dtype="float32", device=str(device), num_blocks=64, max_model_len=512, has_graphs=has_graphs,
        bounds=StepBounds(sequences=4),
    )  # fmt: skip


@contextmanager
def _triton_in(device: torch.device) -> Iterator[None]:
    """In a rehearsal the engine, too, uses the Triton kernels."""
    before = backend.use(backend.TRITON if device.type == "cpu" else backend.AUTO)
    try:
        yield
    finally:
        backend.use(before)


def _logits(runner: ModelRunner, lengths: tuple[int, ...], steps: int) -> Tensor:
    tokens = torch.randint(0, 4096, (max(lengths) + steps,), generator=torch.Generator().manual_seed(2)).tolist()
    tables = [list(range(32 * i + 31, 32 * i - 1, -1)) for i in range(len(lengths))]
    found = []
    for length, table in zip(lengths, tables, strict=True):
        for low, high in ((0, length // 3), (length // 3, length)):
            part = [SeqSlice(high - low, high, (table,))]
            found.append(runner.forward(StepBatch(tokens[low:high], [*range(low, high)], part, [high - low - 1])).cpu())
    for step in range(steps):
        positions = [length + step for length in lengths]
        pairs = [SeqSlice(1, place + 1, (table,)) for place, table in zip(positions, tables, strict=True)]
        batch = StepBatch([tokens[place] for place in positions], positions, pairs, [*range(len(lengths))])
        found.append(runner.forward(batch).cpu())
    return torch.cat(found)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _gap(report: Report, device: torch.device, rehearsal: bool) -> None:
    """0.6B in bf16: the time of a whole step, and the share of it in which the device had nothing to do."""
    shape = SHAPES["0.6b"]
    model = RandomModel(
        family="llama", hidden=shape.hidden, intermediate=shape.ffn, layers=shape.layers, heads=shape.heads.q,
        kv_heads=shape.heads.kv, head_dim=shape.heads.width, vocab=shape.vocab, std=0.02, dtype="bfloat16",
        is_tied=True,
    )  # fmt: skip
    batches, context, steps = (GAP_BATCHES, GAP_CONTEXT, GAP_STEPS) if not rehearsal else ((2,), 5, 1)
    with tempfile.TemporaryDirectory() as name:
        make_random_model(RandomModel(family="llama", vocab=4096) if rehearsal else model, Path(name))
        for has_graphs in (True, False) if device.type == "cuda" else (False,):
            runner = ModelRunner(
                model_dir=Path(name), device=str(device), num_blocks=max(batches) * -(-(context + 1) // 16),
                max_model_len=2 * context, has_graphs=has_graphs, bounds=StepBounds(sequences=max(batches)),
            )  # fmt: skip
            ways = {"graphs, next step begun": True, "graphs": False} if runner.ahead else {"launched": False}
            for batch, (way, is_begun) in product(batches, ways.items()):
                case = f"host gap 0.6b batch {batch} {way}"
                wall, busy = _times(runner, batch, context, steps, device, is_begun=is_begun)
                report.add(case, "step", wall * 1e3, "ms")
                if busy is not None:
                    report.add(case, "host gap", 100 * (1 - busy / wall), "%", 5.0)
            del runner


def _times(
    runner: ModelRunner, batch: int, context: int, steps: int, device: torch.device, *, is_begun: bool
) -> tuple[float, float | None]:
    """Seconds of a step on the clock, and those in which kernels ran on the device, by torch's profiler.

    `is_begun`: each step begins before the tokens of the one before it are asked for, as the engine does.
    """
    each = -(-(context + 1) // 16)
    slices = [SeqSlice(1, context + 1, (range(i * each, (i + 1) * each),)) for i in range(batch)]
    step = StepBatch([5] * batch, [context] * batch, slices, list(range(batch)))
    rows = [SampleRow(row=place, index=0, sampling=_GREEDY) for place in range(batch)]

    def run() -> float:
        started_s = time.perf_counter()
        before: Begun | None = None
        for _ in range(steps):
            if is_begun:
                begun = runner.begin(step, rows, before, range(batch))
                if before is not None:
                    before.results()
                before = begun
            else:
                runner.step(step, rows)
        if before is not None:
            before.results()
        return (time.perf_counter() - started_s) / steps

    run()
    wall = run()
    if device.type != "cuda":
        return wall, None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    busy_us = sum(event.self_device_time_total for event in profile.key_averages())
    return wall, busy_us / 1e6 / steps
