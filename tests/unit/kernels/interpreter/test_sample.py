"""The Triton kernel that draws tokens against the torch reference, in the interpreter: every token."""

import math

import pytest
import torch

from tandem.kernels import triton_tiles
from tandem.kernels.sample import choose_token


@pytest.mark.parametrize("vocab", [30, 100])
def test_choose_token(randn, monkeypatch, vocab) -> None:
    monkeypatch.setattr(triton_tiles, "CHOOSE_TILE", 64)
    wide = randn(6, vocab + 3)
    scores = wide[:, :vocab]
    scores[1] = scores[1].round()
    scores[2, 3:] = -math.inf
    scores -= scores.amax(-1, keepdim=True)
    top_k = torch.tensor([0, 7, 0, 5, 0, 1])
    top_p = torch.tensor([1.0, 0.8, 0.9, 1.0, 0.3, 1.0], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.3, 0.0, 0.0], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.9, 1.0 - 2.0**-53, 0.5, 0.6, 0.99], dtype=torch.float64)
    arguments = (scores, top_k, top_p, min_p, uniforms)
    expected = choose_token(*arguments, backend="reference").tolist()
    assert choose_token(*arguments, backend="triton").tolist() == expected
    assert len(set(expected)) > 1


def test_no_rows() -> None:
    nothing = torch.empty(0, dtype=torch.float64)
    assert choose_token(
        torch.empty(0, 9), torch.empty(0, dtype=torch.int64), nothing, nothing, nothing, backend="triton"
    ).shape == (0,)
