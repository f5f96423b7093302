"""`--deterministic` in bfloat16 in the whole engine: what happens around a request changes no bit of its answer, also
where weights are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.kv_offload import PoolCopies
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.engine.swapping import Swap
from tandem.kernels.deterministic_attention import reference

MODELS = (
    ("llama-biases", "none"), ("qwen3", "none"), ("gemma3", "none"), ("qwen3", "int8"), ("gemma3", "int4"),
)  # fmt: skip
"""A family, and how its weights are quantised."""
PROMPTS = (30, 47, 75, 30, 30)
"""Tokens of each; all begin alike."""


@dataclass
class Asked:
    """The answers, every token with its ten best log-probabilities, and the preemptions."""

    said: dict[int, list[Any]]
    preempted: int
    cached: int
    together: int


def ask(engine: Engine, prompts: dict[int, list[int]], sampling: SamplingParams) -> Asked:
    for number, prompt in prompts.items():
        engine.add(
            EngineRequest(key=f"r{number}", prompt=tuple(prompt), sampling=sampling, hash_root=BlockHash(b"r" * 16))
        )
    asked = Asked({number: [] for number in prompts}, 0, 0, 0)
    while engine.has_work:
        result = engine.step()
        assert not result.failed
        asked.preempted += len(result.preempted)
        asked.together = max(asked.together, len(result.outputs))
        for output in result.outputs:
            asked.said[int(output.key[1:])].append((output.token, output.logprob))
            asked.cached += engine.cached_tokens(output.key) if output.finish is not None else 0
    engine.check_integrity()
    return asked


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def case(request: pytest.FixtureRequest, model_folder: Any, tokens_of: Any) -> Any:
    """A way to make runners of a family, its prompts, and the answer to each when nothing else was ever asked."""
    family, quantize = request.param

    def make(**options: Any) -> ModelRunner:
        shape: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "num_blocks": 96, **options}
        return ModelRunner(model_dir=model_folder(family), is_deterministic=True, quantize=quantize, **shape)

    vocab = make().vocab_size
    common = tokens_of(20, vocab, 9)
    prompts = {n: [*common, *tokens_of(length - 20, vocab, n)] for n, length in enumerate(PROMPTS)}
    # One is drawn at random, so that a differing bit has a chance to become a differing token.
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=10, temperature=0.7, seed=3)
    alone = {n: ask(Engine(make(), clock=MonotonicClock()), {n: prompts[n]}, sampling).said[n] for n in prompts}
    return make, prompts, sampling, alone


@pytest.mark.drawn(2)
def test_it_is_the_same_among_others(case: Any) -> None:
    make, prompts, sampling, alone = case
    asked = ask(Engine(make(), clock=MonotonicClock()), prompts, sampling)
    assert asked.together > 1
    assert asked.said == alone


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("block", "chunk"), [(1, 1), (8, 8), (16, 64)])
def test_it_is_the_same_in_chunks(case: Any, block: int, chunk: int) -> None:
    make, prompts, sampling, alone = case
    runner = make(block_tokens=block, num_blocks=1200 // block)
    config = SchedulerConfig(chunk_tokens=chunk, max_step_tokens=chunk + 4)
    assert ask(Engine(runner, config=config, clock=MonotonicClock()), prompts, sampling).said == alone


def test_it_is_the_same_with_prefix_hits(case: Any) -> None:
    make, prompts, sampling, alone = case
    engine = Engine(make(), clock=MonotonicClock())
    ask(engine, {number + 10: prompt for number, prompt in prompts.items()}, sampling)
    asked = ask(engine, prompts, sampling)
    assert asked.cached >= 16 * len(prompts)
    assert asked.said == alone


@pytest.mark.parametrize("is_swapped", [False, True])
def test_it_is_the_same_after_preemption(case: Any, is_swapped: bool) -> None:
    make, prompts, sampling, alone = case
    runner, swap = make(num_blocks=14), None
    if is_swapped:
        speeds = {"save_bytes_per_s": 1e12, "restore_bytes_per_s": 1e12}
        swap = Swap(PoolCopies(runner.pools), runner.layout, 1 << 30, MonotonicClock(), **speeds)
    asked = ask(Engine(runner, clock=MonotonicClock(), swap=swap), prompts, sampling)
    assert asked.preempted > 0
    assert (swap.tokens > 0) if swap is not None else True
    assert asked.said == alone


def test_it_is_the_same_on_two_threads(case: Any) -> None:
    make, prompts, sampling, alone = case
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert ask(Engine(make(), clock=MonotonicClock()), prompts, sampling).said == alone
    finally:
        torch.set_num_threads(before)


def test_another_way_to_compute_is_noticed(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison distinguishes orders of additions: here that of attention in smaller tiles, in float32,
    as to round to bfloat16 may hide it."""
    make, prompts, sampling, _ = case
    found = [ask(Engine(make(dtype="float32"), clock=MonotonicClock()), prompts, sampling).said]
    monkeypatch.setattr(reference, "KEY_TILE", reference.KEY_TILE // 8)
    found.append(ask(Engine(make(dtype="float32"), clock=MonotonicClock()), prompts, sampling).said)
    assert found[0] != found[1]
