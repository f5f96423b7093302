"""The gated activation of an MLP (Shazeer 2020, SwiGLU)."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.cpu_library import DTYPES, LANES, library_of
from tandem.kernels.silu_mul.reference import silu_mul_reference

__all__ = ["LIBRARY", "is_native", "silu_mul"]

LIBRARY = library_of("silu_mul")


def silu_mul(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """silu(gate) · up, where silu(x) = x / (1 + exp(-x)) is computed in fp32 and rounded to the dtype.

    gate_up: `[rows, 2 · width]`, gate first. Returns `[rows, width]` in its dtype, owned by the caller. Raises
    ValueError for another shape. On the CPU C code runs where there is a compiler; its exp is within 2e-7 of torch's,
    relatively, and its silu within 1e-5 where that is rounded to bfloat16.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [rows, 2 * width], got {tuple(gate_up.shape)}")
    if uses_triton(gate_up.device, backend):
        from tandem.kernels.silu_mul.triton import silu_mul_triton

        return silu_mul_triton(gate_up)
    if not (gate_up.is_contiguous() and is_native(gate_up, backend)):
        return silu_mul_reference(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    is_bf16 = gate_up.dtype is torch.bfloat16
    LIBRARY.call((gate_up.data_ptr(), out.data_ptr(), rows, width, width, is_bf16, torch.get_num_threads()))
    return out


def is_native(gate_up: Tensor, backend: str | None = None) -> bool:
    """True if `silu_mul` is C code for such `gate_up`, if contiguous: it computes each number like all others."""
    is_whole = gate_up.shape[1] // 2 % LANES == 0 and gate_up.dtype in DTYPES
    return is_whole and LIBRARY.serves(gate_up.device, backend)
