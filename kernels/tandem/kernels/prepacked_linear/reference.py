"""prepacked_linear in torch: the specification."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def prepacked_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[rows, inner]` · weightᵀ `[columns, inner]` + bias `[columns]`, in fp32 and rounded once."""
    wide = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), wide).to(x.dtype)
