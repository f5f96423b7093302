"""Test the model runner, the sampler and swapping on a GPU."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.core.sampling import SamplingParams
from tandem.engine.kv_pool import KVPools, PoolCopies
from tandem.engine.model_config import read_model_config
from tandem.engine.pool_plan import kv_layout
from tandem.engine.runner import ModelRunner
from tandem.engine.runner_protocol import SampleRow, SeqSlice, StepBatch
from tandem.engine.sampler import sample
from tandem.engine.sampling_state import ChoiceSampling
from tandem.engine.swapping import Swap
from tests.unit.engine.bundled import MODEL

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "tandem-tiny"


def run(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Logits of a prompt in two chunks, then of three decode steps of two sequences that share its first blocks."""
    table, found = list(range(30, 0, -1)), []
    for low, high in ((0, 200), (200, 300)):
        rows = list(range(high - low))
        batch = StepBatch(tokens[low:high], list(range(low, high)), [SeqSlice(high - low, high, (table,))], rows)
        found.append(runner.forward(batch).cpu())
    other = [*table[:18], 40, 41]
    runner.copy_blocks(0, [(table[18], 40)])
    for place in range(300, 303):
        pair = [SeqSlice(1, place + 1, (table,)), SeqSlice(1, place + 1, (other,))]
        found.append(runner.forward(StepBatch([tokens[place], 7], [place] * 2, pair, [0, 1])).cpu())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        ("float32", "auto", 2e-3),
        ("bfloat16", "auto", 0.5),
        ("float32", "bfloat16", 0.1),
        ("bfloat16", "float32", 0.5),
        ("bfloat16", "float16", 0.5),
    ],
)
def test_the_gpu_agrees_with_the_cpu(dtype: str, kv_dtype: str, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 4096, (310,), generator=generator).tolist()
    runners = [
        ModelRunner(model_dir=BUNDLED, dtype=dtype, kv_dtype=kv_dtype, device=device, num_blocks=48, max_model_len=512)
        for device in ("cpu", "cuda")
    ]
    cpu, gpu = (run(runner, tokens) for runner in runners)
    torch.testing.assert_close(gpu, cpu, atol=tolerance, rtol=0)
    kv = [runner.pools.tensors[0][1:31].float().cpu() for runner in runners]
    torch.testing.assert_close(kv[1], kv[0], atol=tolerance, rtol=2e-2)


def test_cuda_draws_what_the_cpu_draws() -> None:
    rng = random.Random(3)
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(1)) * 4
    filters: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 900, "top_p": 0.7}]
    penalties: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"repetition_penalty": 1.3},
        {"logit_bias": ((3, 5.0), (9, -3.0))},
    ]
    masks: list[dict[str, Any]] = [
        {},
        {"bad_words": ((5,), (59, 7), (58, 59, 11))},
        {"allowed_token_ids": tuple(range(1000, 1300))},
        {"min_tokens": 9, "stop_token_ids": (4, 6)},
    ]
    rows = []
    for i in range(64):
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0]), "seed": i} | rng.choice(filters)
        options |= rng.choice(penalties) | rng.choice(masks)
        params = SamplingParams(max_tokens=99, logprobs=rng.choice([None, 2]), **options)
        rows.append(SampleRow(i, i % 5, ChoiceSampling(params, 0, range(20), range(10, 60))))
    on_cpu, on_cuda = sample(logits, rows), sample(logits.cuda(), rows)
    assert [r.token for r in on_cuda] == [r.token for r in on_cpu]
    for a, b in zip(on_cpu, on_cuda, strict=True):
        assert (a.logprob is None) == (b.logprob is None)
        if a.logprob is not None and b.logprob is not None:
            assert abs(a.logprob.logprob - b.logprob.logprob) < 1e-4
            assert [token for token, _ in a.logprob.top] == [token for token, _ in b.logprob.top]


def test_a_bad_row_is_told_on_cuda() -> None:
    logits = torch.zeros(3, 1000, device="cuda")
    logits[1, 5] = float("nan")
    state = ChoiceSampling(SamplingParams(max_tokens=9, temperature=0.0), 0, (1,))
    assert [r.is_valid for r in sample(logits, [SampleRow(i, 0, state) for i in range(3)])] == [True, False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_come_back(dtype: str) -> None:
    layout = kv_layout(read_model_config(MODEL), dtype=dtype, block_tokens=16)
    pools = KVPools(layout, (64,), torch.device("cuda"))
    copies, pool = PoolCopies(pools), pools.tensors[0]
    pool.normal_()
    before = pool.clone()
    saved = copies.save(0, list(range(5, 25)))
    assert saved is not None
    assert saved.is_pinned()
    pool[5:25] = 0
    copies.restore(0, list(range(40, 55)), saved, 5)
    assert pool[40:55].equal(before[10:25])
    assert pool[55:].equal(before[55:])
    swap = Swap(copies, layout, 1 << 30, MonotonicClock())
    swap.try_speeds()
    assert min(swap.save_bytes_per_s, swap.restore_bytes_per_s) > 0
