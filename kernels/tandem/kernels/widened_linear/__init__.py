"""Computes products of bfloat16 in float32, on CPUs where the libraries have no fast ones. Few rows go to C code that
reads the weight as it is, many to torch, a slice of the weight at a time. Torch's own in bfloat16 take up to 500 times
as long."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.cpu_library import library_of
from tandem.kernels.widened_linear.reference import widened_linear_reference

__all__ = ["LIBRARY", "widened_linear"]

LIBRARY = library_of("widened_linear")
FEW_ROWS = 12
"""Up to so many rows go to the C code. Measured on one core held to AVX2: it takes 0.3 to 0.8 of the slices' time for 1
to 4 rows, 0.7 to 0.95 for 12, and as long for 16; of torch's 0.7 to 1.1 for one row."""


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[rows, inner]` · weightᵀ `[columns, inner]` + bias `[columns]`, all bfloat16 on the CPU; sums are in float32.

    Returns `[rows, columns]`, owned by the caller. Thread-safe.
    """
    is_plain = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if 0 < x.shape[0] <= FEW_ROWS and is_plain and LIBRARY.serves():
        return _by_code(x, weight, bias)
    return widened_linear_reference(x, weight, bias)


def _by_code(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, (columns, inner) = x.shape[0], weight.shape
    out = torch.empty((rows, columns), dtype=x.dtype)
    addresses = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    LIBRARY.call((*addresses, rows, inner, columns, x.stride(0), torch.get_num_threads()))
    return out
