"""rms_norm for the GPU: one program a row, which is read once. Not yet timed on a device."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton_tiles import row_warps


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_kernel(
    x_ptr,
    added_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    added_stride,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_ADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, PADDED)
    mask = numbers < WIDTH
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + numbers, mask=mask, other=0.0)
    if HAS_ADDED:
        added = tl.load(added_ptr + row * added_stride + numbers, mask=mask, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(dtype)  # rounded, as the next reader of x sees it
        tl.store(x_ptr + row * x_stride + numbers, x, mask=mask)
    x = x.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + numbers, mask=mask, other=0.0)
    scaled = normed.to(dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + numbers, scaled.to(dtype), mask=mask)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, added: Tensor | None) -> Tensor:
    """See `rms_norm`; numbers of a row of x are neighbours."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if added is not None and added.stride(1) != 1:
        added = added.contiguous()
    other, padded = x if added is None else added, triton.next_power_of_2(width)
    if out.numel():
        _rms_norm_kernel[(rows,)](
            x, other, weight.contiguous(), out, x.stride(0), other.stride(0), eps, WIDTH=width, PADDED=padded,
            HAS_ADDED=added is not None, num_warps=row_warps(padded),
        )  # fmt: skip
    return out
