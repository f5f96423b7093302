"""RMSNorm of a residual stream, with the addition before it (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.cpu_library import DTYPES, LANES, library_of
from tandem.kernels.rms_norm.reference import rms_norm_reference
from tandem.kernels.triton_tiles import MOST_ROW_NUMBERS

__all__ = ["LIBRARY", "rms_norm"]

LIBRARY = library_of("rms_norm")


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, added: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight of every row, in fp32, rounded to the dtype before the weight is applied.

    x: `[rows, width]`; with `added`, of the same shape, x becomes x + added first, in place. weight: `[width]`. All
    have one dtype. Returns `[rows, width]`, owned by the caller. Raises ValueError (shapes) or TypeError (dtypes). On
    the CPU C code runs where there is a compiler; torch differs from it in the order of a sum.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or (added is not None and added.shape != x.shape):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and added do not fit")
    if weight.dtype is not x.dtype or (added is not None and added.dtype is not x.dtype):
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}, added {None if added is None else added.dtype}")
    if uses_triton(x.device, backend) and x.stride(1) == 1 and x.shape[1] <= MOST_ROW_NUMBERS:
        from tandem.kernels.rms_norm.triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps, added)
    is_whole = x.shape[1] % LANES == 0 and x.is_contiguous() and (added is None or added.is_contiguous())
    if not (is_whole and x.dtype in DTYPES and LIBRARY.serves(x.device, backend)):
        return rms_norm_reference(x, weight, eps, added)
    out = torch.empty_like(x)
    LIBRARY.call((
        x.data_ptr(), 0 if added is None else added.data_ptr(), weight.data_ptr(), out.data_ptr(),
        *x.shape, x.dtype is torch.bfloat16, torch.get_num_threads(),
    ), eps)  # fmt: skip
    return out
