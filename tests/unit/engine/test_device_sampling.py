"""Tokens drawn without sorting, as on an accelerator, are those that the CPU's sampler draws, number for number."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch

from tandem.core.sampling import SamplingParams
from tandem.engine import sampler
from tandem.engine.choice_sampling import ChoiceSampling
from tandem.engine.sampling_filters import choose_filtered
from tandem.engine.sampling_types import SampleRow
from tandem.kernels.sample import choose_token

FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 40}, {"top_k": 100_000}, {"top_p": 0.05}, {"top_p": 0.9}, {"top_p": 0.9999},
    {"min_p": 0.05}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.8}, {"top_k": 9, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 0.02}, {"top_k": 100, "top_p": 0.7, "min_p": 0.3},
]  # fmt: skip


def heated(rows: int, vocab: int, scale: float) -> torch.Tensor:
    """Scores with the best of each row at 0: plain ones, many ties, all equal, most forbidden, one left."""
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows + vocab)) * scale
    scores[1] = scores[1].round()
    scores[2] = 0.0
    scores[3, : vocab - 3] = -math.inf
    scores[4] = -math.inf
    scores[4, vocab // 2] = 3.0
    return scores - scores.amax(-1, keepdim=True)


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_the_search_draws_what_sorting_draws(options: dict[str, Any], scale: float) -> None:
    scores = heated(8, 2000, scale)
    top_k = torch.tensor([min(options.get("top_k", 0), 2000)] * 8)
    top_p = torch.tensor([options.get("top_p", 1.0)] * 8, dtype=torch.float64)
    min_p = torch.tensor([options.get("min_p", 0.0)] * 8, dtype=torch.float64)
    for draw in range(8):
        uniforms = torch.tensor([sampler.uniform(draw, 0, i) for i in range(8)], dtype=torch.float64)
        expected = choose_filtered(scores, top_k, top_p, min_p, uniforms)
        assert choose_token(scores, top_k, top_p, min_p, uniforms).tolist() == expected.tolist()


def test_rows_with_other_filters_do_not_matter() -> None:
    scores = heated(8, 300, 2.0)
    uniforms = torch.rand(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rng = random.Random(4)
    top_k = torch.tensor([rng.choice([0, 5, 80]) for _ in range(8)])
    top_p = torch.tensor([rng.choice([1.0, 0.5, 0.99]) for _ in range(8)], dtype=torch.float64)
    min_p = torch.tensor([rng.choice([0.0, 0.1]) for _ in range(8)], dtype=torch.float64)
    together = choose_token(scores, top_k, top_p, min_p, uniforms).tolist()
    alone = [
        int(choose_token(*(each[i : i + 1] for each in (scores, top_k, top_p, min_p, uniforms)))) for i in range(8)
    ]
    assert together == alone


def test_the_smallest_and_the_largest_random_number_find_a_kept_token() -> None:
    scores = heated(6, 50, 1.0)
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53] * 3, dtype=torch.float64)
    for options in FILTERS:
        arguments = (
            torch.tensor([min(options.get("top_k", 0), 50)] * 6),
            torch.tensor([options.get("top_p", 1.0)] * 6, dtype=torch.float64),
            torch.tensor([options.get("min_p", 0.0)] * 6, dtype=torch.float64),
            uniforms,
        )
        assert choose_token(scores, *arguments).tolist() == choose_filtered(scores, *arguments).tolist()


def test_a_whole_sample_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    logits = torch.randn(24, 3000, generator=torch.Generator().manual_seed(6)) * 4
    rows = []
    for i in range(24):
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.3]), "seed": i} | rng.choice(FILTERS)
        options |= rng.choice([{}, {"frequency_penalty": 0.7}, {"bad_words": ((5,),)}])
        rows.append(SampleRow(i, i % 5, ChoiceSampling(SamplingParams(max_tokens=99, **options), 0, range(20))))
    expected = sampler.sample(logits, rows)
    monkeypatch.setattr(sampler, "choose_filtered", partial(choose_token, backend="reference"))
    assert [r.token for r in sampler.sample(logits, rows)] == [r.token for r in expected]


def test_arguments_that_do_not_fit_are_named() -> None:
    scores, one = heated(5, 20, 1.0), torch.ones(5, dtype=torch.float64)
    top_k = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match="one number a row"):
        choose_token(scores, top_k[:4], one, one, one)
    with pytest.raises(TypeError, match=r"expected torch\.float64, got torch\.float32"):
        choose_token(scores, top_k, one.float(), one, one)
