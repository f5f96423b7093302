"""kv_store for the GPU: one program a token copies all heads of its key and value."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_kernel(
    k_ptr,
    v_ptr,
    view_ptr,
    slots_ptr,
    k_stride,
    v_stride,
    stride_block,
    stride_plane,
    stride_head,
    BLOCK_TOKENS: tl.constexpr,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        numbers = tl.arange(0, PADDED)
        mask = numbers < NUMBERS
        place = (slot // BLOCK_TOKENS) * stride_block + (slot % BLOCK_TOKENS) * WIDTH
        target = view_ptr + place + (numbers // WIDTH) * stride_head + numbers % WIDTH
        k = tl.load(k_ptr + token * k_stride + numbers, mask=mask)
        v = tl.load(v_ptr + token * v_stride + numbers, mask=mask)
        tl.store(target, k.to(view_ptr.dtype.element_ty), mask=mask)
        tl.store(target + stride_plane, v.to(view_ptr.dtype.element_ty), mask=mask)


def kv_store_triton(k: Tensor, v: Tensor, layer_view: Tensor, slot_mapping: Tensor) -> None:
    """See `kv_store`; heads and their numbers are contiguous."""
    tokens, heads, width = k.shape
    if tokens == 0:
        return
    _store_kernel[(tokens,)](
        k,
        v,
        layer_view,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        layer_view.stride(0),
        layer_view.stride(1),
        layer_view.stride(2),
        BLOCK_TOKENS=layer_view.shape[3],
        NUMBERS=heads * width,
        WIDTH=width,
        PADDED=triton.next_power_of_2(heads * width),
        num_warps=4,
    )
