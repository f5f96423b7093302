"""forbid for the GPU: a program a piece of a row. Not yet timed on a device."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit(do_not_specialize=["width", "stride"])
def _forbid_kernel(scores_ptr, rows_ptr, bits_ptr, width, stride, TILE: tl.constexpr):
    row = tl.load(rows_ptr + tl.program_id(0))
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = tokens < width
    bits = tl.load(bits_ptr + tl.program_id(0).to(tl.int64) * stride + tokens // 8, mask=mask, other=255).to(tl.int32)
    is_forbidden = (bits >> (tokens % 8)) & 1 == 0
    tl.store(scores_ptr + row * width + tokens, float("-inf"), mask=mask & is_forbidden)


def forbid_triton(scores: Tensor, rows: Sequence[int], bits: Tensor) -> None:
    """See `forbid`."""
    if not rows:
        return
    places = torch.tensor(rows, dtype=torch.int64).to(scores.device, non_blocking=True)
    grid = (len(rows), triton.cdiv(scores.shape[1], _TILE))
    _forbid_kernel[grid](scores, places, bits, scores.shape[1], bits.shape[1], TILE=_TILE)
