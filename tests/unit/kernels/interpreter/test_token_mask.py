"""The Triton kernel that forbids tokens against the torch reference, in the interpreter."""

import pytest
import torch

from tandem.kernels.token_mask import forbid


@pytest.mark.parametrize("width", [5, 1030])
def test_forbid(randn, width: int) -> None:
    scores, rows = randn(5, width), [4, 0, 2]
    bits = torch.randint(0, 256, (3, width // 8 + 2), dtype=torch.uint8)
    want = scores.clone()
    forbid(want, rows, bits, backend="reference")
    assert not torch.equal(scores, want)
    forbid(scores, rows, bits, backend="triton")
    assert torch.equal(scores, want)
