"""The dtypes in which KV may be stored (`tandem.core.kv_layout`), as torch names them, and which it multiplies."""

from __future__ import annotations

from functools import cache

import torch

from tandem.core.kv_layout import DTYPE_BYTES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


@cache
def has_bf16_products() -> bool:
    """True if torch and oneDNN have bfloat16 product instructions on this CPU, as it may be used: from AVX-512 on.

    Elsewhere torch's products of bfloat16 take up to 500 times as long as those of float32, and none is asked for.
    """
    is_there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return is_there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In what products of numbers of `dtype` are to be computed by torch: float32 where it has none of bfloat16."""
    is_widened = dtype is torch.bfloat16 and device.type == "cpu" and not has_bf16_products()
    return torch.float32 if is_widened else dtype
