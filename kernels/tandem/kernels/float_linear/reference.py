"""float_linear in torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def float_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, part: int) -> Tensor:
    """x `[rows, inner]` · weightᵀ `[columns, inner]` + bias `[columns]` in fp32: `part` numbers of the inner dimension
    are summed at a time, and those sums are added in their order."""
    out = torch.zeros((x.shape[0], weight.shape[0]))
    for first in range(0, weight.shape[1], part):
        out += x[:, first : first + part] @ weight[:, first : first + part].T
    return out if bias is None else out + bias
