"""silu_mul for the GPU: a program a piece of a row. Not yet timed on a device."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.triton_tiles import GATE_TILE, GATE_WARPS


@triton.jit(do_not_specialize=["width"])
def _silu_mul_kernel(gate_up_ptr, out_ptr, stride, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = numbers < width
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + numbers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + width + numbers, mask=mask, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(gate))  # of a falling exponent: exp(-gate) would overflow
    activated = (gate * tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * width + numbers, (activated * up).to(dtype), mask=mask)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """See `silu_mul`."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul_kernel[(rows, triton.cdiv(width, GATE_TILE))](
            gate_up, out, gate_up.stride(0), width, TILE=GATE_TILE, num_warps=GATE_WARPS
        )
    return out
