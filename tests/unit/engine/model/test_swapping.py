"""KV of a real model that waited in host memory gives the same bits as if nothing had happened.

The pools of a CPU stand for a device's: a worker on a CPU keeps nothing, for its KV is in host memory already.
"""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.block_hash import BlockHash
from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.engine import kv_offload
from tandem.engine.engine import Engine
from tandem.engine.kv_offload import PoolCopies
from tandem.engine.request import EngineRequest
from tandem.engine.runner import ModelRunner
from tandem.engine.step_budget import SchedulerConfig
from tandem.engine.swapping import Swap

ROOT = BlockHash(b"r" * 16)


def answers(runner: ModelRunner, swap: Swap | None, prompts: list[list[int]]) -> tuple[dict[str, list[Any]], int]:
    """Tokens with their log-probabilities, and how many preemptions it took."""
    engine = Engine(runner, config=SchedulerConfig(), clock=MonotonicClock(), swap=swap)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)
    for index, prompt in enumerate(prompts):
        request = EngineRequest(key=f"r{index}", prompt=tuple(prompt), sampling=sampling, hash_root=ROOT)
        engine.add(request)
    said: dict[str, list[Any]] = {}
    preempted = 0
    while engine.has_work:
        result = engine.step()
        engine.check_integrity()
        assert not result.failed
        preempted += len(result.preempted)
        for output in result.outputs:
            said.setdefault(output.key, []).append((output.token, output.logprob))
    return said, preempted


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16"])
def test_no_bit_changes(model_folder: Any, tokens_of: Any, kv_dtype: str) -> None:
    options: dict[str, Any] = {"max_model_len": 128, "is_deterministic": True, "kv_dtype": kv_dtype}
    folder = model_folder("qwen3")
    roomy = ModelRunner(model_dir=folder, num_blocks=64, **options)
    tight = ModelRunner(model_dir=folder, num_blocks=12, **options)
    prompts = [tokens_of(30, roomy.vocab_size, seed) for seed in range(3)]
    wanted, undisturbed = answers(roomy, None, prompts)
    quick = {"save_bytes_per_s": 1e12, "restore_bytes_per_s": 1e12}
    swap = Swap(PoolCopies(tight.pools), tight.layout, 1 << 30, MonotonicClock(), **quick)
    said, preempted = answers(tight, swap, prompts)
    assert undisturbed == 0 < preempted
    assert swap.requests > 0
    assert swap.tokens > 0
    assert said == wanted


@pytest.mark.parametrize("pieces", [1, 2, 1 << 20])
def test_copies_bring_blocks_back_to_other_places(
    model_folder: Any, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks are gathered at a time."""
    runner = ModelRunner(model_dir=model_folder("llama"), num_blocks=20, max_model_len=64)
    copies, pool = PoolCopies(runner.pools), runner.pools.tensors[0]
    monkeypatch.setattr(kv_offload, "PIECE_BYTES", pieces * pool[0].nbytes)
    pool.normal_()
    before = pool.clone()
    saved = copies.save(0, [3, 5, 7])
    assert saved is not None
    pool[[3, 5, 7]] = 0
    copies.restore(0, [11, 2], saved, 1)
    assert pool[11].equal(before[5])
    assert pool[2].equal(before[7])
    untouched = [block for block in range(20) if block not in (2, 3, 5, 7, 11)]
    assert pool[untouched].equal(before[untouched])


def test_real_copies_have_a_speed(model_folder: Any) -> None:
    runner = ModelRunner(model_dir=model_folder("llama"), num_blocks=20, max_model_len=64)
    swap = Swap(PoolCopies(runner.pools), runner.layout, 1 << 30, MonotonicClock())
    swap.try_speeds()
    assert swap.save_bytes_per_s > 0
    assert 0 < swap.seconds(64) < 1
