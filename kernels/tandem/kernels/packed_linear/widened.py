"""Products of bfloat16 on CPUs whose libraries have no fast ones: those of float32, a slice of the weight at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 3
"""Up to so many rows torch multiplies in bfloat16 itself: held to AVX2, it takes 0.7 of the time for one row, 0.9 for
two, and 1.5 for four; for 512 rows 5, and 500 on a Zen 3."""
_SLICE_NUMBERS = 1 << 18
"""Of a slice as float32: 1 MiB, which a core's cache keeps between the conversion and the product."""


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[rows, inner]` · weightᵀ `[columns, inner]` + bias `[columns]`, all bfloat16; the sums are in float32.

    Returns `[rows, columns]`, owned by the caller. Thread-safe.
    """
    rows, (columns, inner) = x.shape[0], weight.shape
    if rows <= FEW_ROWS:
        return functional.linear(x, weight, bias)
    wide, wide_bias = x.float(), None if bias is None else bias.float()
    out = torch.empty((rows, columns), dtype=x.dtype)
    step = max(1, _SLICE_NUMBERS // max(1, inner))
    for first in range(0, columns, step):
        part = slice(first, first + step)
        out[:, part] = functional.linear(wide, weight[part].float(), None if wide_bias is None else wide_bias[part])
    return out
