"""The sampler chooses on a CUDA device what it chooses on the CPU."""

from __future__ import annotations

import random
from typing import Any

import torch

from tandem.core.sampling import SamplingParams
from tandem.engine.choice_sampling import ChoiceSampling
from tandem.engine.sampler import sample
from tandem.engine.sampling_types import SampleRow


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
