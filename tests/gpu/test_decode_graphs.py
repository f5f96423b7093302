"""Decode steps replayed as CUDA graphs against the same steps launched kernel by kernel; what they ask of the host."""

from pathlib import Path

import pytest
import torch

from tandem.core.sampling import SamplingParams
from tandem.engine.memory_plan import StepBounds
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampling_state import ChoiceSampling

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


def test_steps_begun_one_behind_the_other_choose_the_same_and_ask_the_host_nothing() -> None:
    """Greedy and drawn tokens, with logprobs; in turns with steps whose tokens are waited for."""
    choices = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05}, {"temperature": 0.0, "logprobs": 3}, {"temperature": 0.7, "logprobs": 1},
    ]  # fmt: skip
    states = [
        ChoiceSampling(SamplingParams(max_tokens=9, seed=i, **options), 0, (1,))  # type: ignore[arg-type]
        for i, options in enumerate(choices)
    ]
    everybody = list(range(6))

    def rows(index: int) -> list[SampleRow]:
        return [SampleRow(place, index, state) for place, state in enumerate(states)]

    waited, begun = (make_runner(dtype="float32", has_graphs=True) for _ in range(2))
    lengths, tokens, expected = list(LENGTHS), everybody, []
    for index in range(6):
        expected.append(waited.step(decode(lengths, everybody, tokens), rows(index)))
        tokens, lengths = [one.token for one in expected[-1]], [length + 1 for length in lengths]
    begun.step(decode(LENGTHS, everybody, everybody), rows(0))  # compiles what draws tokens
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps = [begun.begin(decode(LENGTHS, everybody, everybody), rows(0))]
        for index in range(1, 6):
            batch = decode([length + index for length in LENGTHS], everybody, [0] * 6)
            steps.append(begun.begin(batch, rows(index), steps[-1], everybody))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, wanted in zip(steps, expected, strict=True):
        assert step is not None
        found = step.results()
        assert [one.token for one in found] == [one.token for one in wanted]
        assert [one.logprob is None for one in found] == [one.logprob is None for one in wanted]


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
