"""rotate for the GPU: one program a row, all heads at once, in place. Not yet timed on a device.

It is not fused with `kv_store`: that would save one read and one write of a step's keys, a part in thousands of what a
decode step reads, and tie the decoder to the layout of the pool.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton_tiles import row_warps


@triton.jit
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    x_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, PADDED_HEADS)
    pairs = tl.arange(0, PADDED_HALF)
    has_pair = pairs < HALF
    mask = (heads[:, None] < HEADS) & has_pair[None, :]
    dtype = x_ptr.dtype.element_ty
    first_ptr = x_ptr + row * x_stride + heads[:, None] * (2 * HALF) + pairs[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_first = tl.load(cos_ptr + row * cos_stride + pairs, mask=has_pair, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_ptr + row * cos_stride + HALF + pairs, mask=has_pair, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_ptr + row * sin_stride + pairs, mask=has_pair, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_ptr + row * sin_stride + HALF + pairs, mask=has_pair, other=0.0).to(tl.float32)[None, :]
    # Products are rounded before they are added up, as the reference does.
    turned_first = (first * cos_first).to(dtype).to(tl.float32) + (second * sin_first).to(dtype).to(tl.float32)
    turned_second = (second * cos_second).to(dtype).to(tl.float32) + (first * sin_second).to(dtype).to(tl.float32)
    tl.store(first_ptr, turned_first.to(dtype), mask=mask)
    tl.store(first_ptr + HALF, turned_second.to(dtype), mask=mask)


def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rotate`; x has neighbouring heads, cos and sin neighbouring numbers. x is written over."""
    rows, heads, width = x.shape
    padded_heads, padded_half = triton.next_power_of_2(heads), triton.next_power_of_2(max(1, width // 2))
    if x.numel():
        _rotate_kernel[(rows,)](
            x, cos, sin, x.stride(0), cos.stride(0), sin.stride(0), HEADS=heads, HALF=width // 2,
            PADDED_HEADS=padded_heads, PADDED_HALF=padded_half, num_warps=row_warps(padded_heads * padded_half),
        )  # fmt: skip
    return x
