"""Decode steps replayed as CUDA graphs against the same steps launched kernel by kernel; what they ask of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.memory_plan import StepBounds
from tandem.engine.runner import ModelRunner
from tandem.engine.step_batch import SeqSlice, StepBatch

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tandem-tiny"
LENGTHS = [17, 5, 100, 64, 1, 48]
TABLES = [[i + 6 * j for j in range(8)] for i in range(6)]


def make_runner(*, dtype: str, has_graphs: bool) -> ModelRunner:
    runner = ModelRunner(
        model_dir=BUNDLED, dtype=dtype, device="cuda", num_blocks=48, max_model_len=512, has_graphs=has_graphs,
        bounds=StepBounds(sequences=8),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for length, table in zip(LENGTHS, TABLES, strict=True):
        tokens = torch.randint(0, 4096, (length,), generator=generator).tolist()
        runner.forward(StepBatch(tokens, list(range(length)), [SeqSlice(length, length, (table,))], [length - 1]))
    return runner


def decode(lengths: list[int], chosen: list[int], tokens: list[int]) -> StepBatch:
    slices = [SeqSlice(1, lengths[i] + 1, (TABLES[i],)) for i in chosen]
    return StepBatch(tokens, [lengths[i] for i in chosen], slices, list(range(len(chosen))))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.5)])
def test_replayed_steps_are_launched_steps(dtype: str, tolerance: float) -> None:
    launched, replayed = make_runner(dtype=dtype, has_graphs=False), make_runner(dtype=dtype, has_graphs=True)
    assert launched.memory.graphs == 0 < replayed.memory.graphs
    assert replayed.has_captured
    lengths, tokens = list(LENGTHS), {i: i + 7 for i in range(6)}
    for chosen in ([0, 1, 2, 3, 4, 5], [3], [1, 4, 5], [2, 0], [5, 4, 3, 2, 1], [0]):
        batch = decode(lengths, chosen, [tokens[i] for i in chosen])
        expected, found = launched.forward(batch), replayed.forward(batch)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        for i, token in zip(chosen, expected.argmax(-1).tolist(), strict=True):
            tokens[i], lengths[i] = token, lengths[i] + 1
    kv = [runner.pools.tensors[0].float().cpu() for runner in (launched, replayed)]
    torch.testing.assert_close(kv[1], kv[0], atol=tolerance, rtol=2e-2)


def test_a_replayed_step_asks_the_host_nothing_and_takes_no_memory() -> None:
    runner = make_runner(dtype="bfloat16", has_graphs=True)
    graphs = runner.decode_graphs((8,))
    assert graphs.capture()
    graphs.run(decode(LENGTHS, [0, 1], [5, 6]))
    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = graphs.run(decode(LENGTHS, [2, 3, 4], [5, 6, 7]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == held
    assert logits.isfinite().all()


def test_what_was_planned_for_graphs_is_enough() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    runner = make_runner(dtype="bfloat16", has_graphs=False)
    without = before - torch.cuda.mem_get_info()[0]
    kept = runner.decode_graphs((1, 2, 4, 8))
    assert kept.capture()
    with_graphs = before - torch.cuda.mem_get_info()[0]
    planned = make_runner(dtype="bfloat16", has_graphs=True).memory.graphs
    assert with_graphs - without <= planned
