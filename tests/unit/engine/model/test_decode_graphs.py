"""Decode steps in static buffers of a few sizes, padded, without capture: the same tokens, and no KV but their own."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.engine.decode_graphs import graph_bytes, graph_sizes
from tandem.engine.engine import Engine
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SeqSlice, StepBatch
from tests.unit.engine.bundled import Answers, request, run

Folder = Callable[[str], Path]


def make_runner(folder: Path, **options: object) -> ModelRunner:
    options = {"dtype": "float32", "num_blocks": 64, "max_model_len": 128} | options
    return ModelRunner(model_dir=folder, **options)  # type: ignore[arg-type]


def fill(runner: ModelRunner, lengths: list[int]) -> list[list[int]]:
    """Prompts of these lengths in blocks of their own, scattered; the tables."""
    rng = random.Random(1)
    free = rng.sample(range(runner.num_blocks[0]), runner.num_blocks[0])
    tables = []
    for length in lengths:
        tables.append([free.pop() for _ in range(8)])
        tokens = [rng.randrange(runner.vocab_size) for _ in range(length)]
        runner.forward(StepBatch(tokens, list(range(length)), [SeqSlice(length, length, (tables[-1],))], [length - 1]))
    return tables


def decode(tables: list[list[int]], lengths: list[int], chosen: list[int], tokens: list[int]) -> StepBatch:
    """The next token of the sequences `chosen`."""
    slices = [SeqSlice(1, lengths[i] + 1, (tables[i],)) for i in chosen]
    return StepBatch(tokens, [lengths[i] for i in chosen], slices, list(range(len(chosen))))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_padded_steps_are_plain_steps(model_folder: Folder, family: str) -> None:
    """Batches grow and shrink, so that rows and tables hold what larger steps left there."""
    lengths = [17, 5, 33, 64, 1, 48]
    plain, padded = make_runner(model_folder(family)), make_runner(model_folder(family))
    tables = fill(plain, lengths)
    assert fill(padded, lengths) == tables
    graphs = padded.decode_graphs((1, 2, 4, 8))
    steps = [[0, 1, 2, 3, 4, 5], [3], [1, 4, 5], [2, 0], [5, 4, 3, 2, 1], [0]]
    tokens = {i: i + 7 for i in range(6)}
    for chosen in steps:
        batch = decode(tables, lengths, chosen, [tokens[i] for i in chosen])
        assert graphs.takes(batch)
        expected, found = plain.forward(batch), graphs.run(batch)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
        for i, token in zip(chosen, expected.argmax(-1).tolist(), strict=True):
            tokens[i], lengths[i] = token, lengths[i] + 1
    torch.testing.assert_close(padded.pools.tensors[0], plain.pools.tensors[0], atol=2e-4, rtol=1e-4)


def test_padding_writes_no_kv(model_folder: Folder) -> None:
    runner = make_runner(model_folder("llama"))
    tables = fill(runner, [16] * 5)
    graphs = runner.decode_graphs((8,))
    graphs.run(decode(tables, [16] * 5, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]))
    pool = runner.pools.tensors[0]
    before = pool.clone()
    graphs.run(decode(tables, [17] * 5, [2], [9]))  # seven rows of padding, four with another sequence's table
    changed = (pool != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == [tables[2][1]]


def answers(runner: ModelRunner) -> Answers:
    """Greedy and drawn tokens of five requests that end one after the other."""
    asked = []
    for i in range(5):
        options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": i} if i % 2 else {}
        asked.append(request(f"r{i}", range(3 + i, 40 + 2 * i), max_tokens=40 + 5 * i, **options))
    return run(Engine(runner, clock=MonotonicClock()), *asked)


@pytest.mark.parametrize("blocks", [64, 9])
def test_an_engine_answers_the_same_tokens(model_folder: Folder, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all, and with preemption; first of more sequences than the sizes have, then of fewer and fewer."""
    folder = model_folder("llama")
    expected = answers(make_runner(folder, num_blocks=blocks))
    assert bool(expected.preempted) == (blocks == 9)
    runner = make_runner(folder, num_blocks=blocks)
    graphs = runner.decode_graphs(graph_sizes(4))
    plain_run = graphs.run
    sizes: list[int] = []
    unknown: list[int] = []

    def counted(batch: StepBatch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(len(batch.sequences))
        if tokens is not None:
            unknown.append(len(tokens))
        return plain_run(batch, tokens)

    monkeypatch.setattr(graphs, "run", counted)
    monkeypatch.setattr(runner, "_graphs", graphs)
    assert answers(runner).outputs == expected.outputs
    assert len(sizes) > 10
    assert len(unknown) > 10, "inputs are what the step before chose"
    assert len(set(unknown)) > 1


def test_what_is_no_plain_decode_is_not_taken(model_folder: Folder) -> None:
    runner = make_runner(model_folder("llama"))
    graphs, table = runner.decode_graphs((1, 2)), ([0, 1],)
    one = SeqSlice(1, 4, table)
    assert graphs.takes(StepBatch([5], [3], [one], [0]))
    assert not graphs.takes(StepBatch([5], [3], [one], []))
    assert not graphs.takes(StepBatch([5, 6], [3, 4], [SeqSlice(2, 5, table)], [0, 1]))
    assert not graphs.takes(StepBatch([5, 6], [3, 3], [one, one], [1, 0]))
    assert not graphs.takes(StepBatch([5] * 3, [3] * 3, [one] * 3, [0, 1, 2]))
    assert not graphs.takes(StepBatch([], [], [], []))


def test_a_table_too_short_for_its_context_is_refused(model_folder: Folder) -> None:
    graphs = make_runner(model_folder("llama")).decode_graphs((1,))
    with pytest.raises(ValueError, match="17 tokens need 2 blocks, the table has 1"):
        graphs.run(StepBatch([5], [16], [SeqSlice(1, 17, ([0],))], [0]))


def test_a_cpu_has_no_graphs_and_plans_no_memory_for_them(model_folder: Folder) -> None:
    runner = make_runner(model_folder("llama"), has_graphs=True)
    assert runner.memory.graphs == 0
    first, second = (runner.forward(StepBatch([t], [0], [SeqSlice(1, 1, ([3],))], [0])) for t in (5, 6))
    assert first.data_ptr() != second.data_ptr()


def test_sizes_are_few_and_reach_the_most() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 100)


def test_graphs_hold_their_logits_and_the_largest_steps_activations() -> None:
    assert graph_bytes((), 10, 100, 2, 8) == 0
    few, more = graph_bytes((1, 2), 1000, 50_000, 2, 8), graph_bytes((1, 2, 4), 1000, 50_000, 2, 8)
    assert more - few > 4 * 50_000 * (2 + 4) + 2 * 1000
