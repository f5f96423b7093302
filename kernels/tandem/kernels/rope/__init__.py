"""Rotary positions (Su et al. 2021), with the halves of a head as pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.cpu_library import DTYPES, LANES, library_of
from tandem.kernels.rope.reference import rotate_reference
from tandem.kernels.triton_tiles import MOST_ROW_NUMBERS

__all__ = ["LIBRARY", "rotate"]

LIBRARY = library_of("rope")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str | None = None) -> Tensor:
    """x · cos + swap(x) · sin, where swap exchanges the halves of a head; x may be written over.

    x: `[rows, heads, width]`, row stride free, the rest contiguous. cos, sin: `[rows, width]`, row stride free; the
    first half of sin is negated. All have one dtype, in which both products are rounded. Returns `[rows, heads,
    width]`: new, or x itself. Raises ValueError (shapes) or TypeError (dtypes). On the CPU C code runs where there is a
    compiler.
    """
    rows, heads, width = x.shape
    if cos.shape != (rows, width) or sin.shape != cos.shape:
        raise ValueError(f"x {tuple(x.shape)}, cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit")
    if cos.dtype is not x.dtype or sin.dtype is not x.dtype:
        raise TypeError(f"x is {x.dtype}, cos {cos.dtype}, sin {sin.dtype}")
    has_heads, has_tables = x.stride()[1:] == (width, 1), cos.stride(1) == 1 and sin.stride() == cos.stride()
    fits = has_heads and has_tables and width % 2 == 0 and heads * width <= MOST_ROW_NUMBERS
    if uses_triton(x.device, backend) and fits:
        from tandem.kernels.rope.triton import rotate_triton

        return rotate_triton(x, cos, sin)
    is_whole = width % (2 * LANES) == 0 and x.dtype in DTYPES and has_heads
    if not (is_whole and has_tables and LIBRARY.serves(x.device, backend)):
        return rotate_reference(x, cos, sin)
    LIBRARY.call((
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, width, x.stride(0), cos.stride(0),
        x.dtype is torch.bfloat16, torch.get_num_threads(),
    ))  # fmt: skip
    return x
