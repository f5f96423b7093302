"""widened_linear in torch: the specification, and the path of many rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SLICE_NUMBERS = 1 << 18
"""Of a slice as float32: 1 MiB, which a core's cache keeps between the conversion and the product."""


def widened_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `widened_linear`."""
    rows, (columns, inner) = x.shape[0], weight.shape
    wide, wide_bias = x.float(), None if bias is None else bias.float()
    out = torch.empty((rows, columns), dtype=x.dtype)
    step = max(1, _SLICE_NUMBERS // max(1, inner))
    for first in range(0, columns, step):
        part = slice(first, first + step)
        out[:, part] = functional.linear(wide, weight[part].float(), None if wide_bias is None else wide_bias[part])
    return out
