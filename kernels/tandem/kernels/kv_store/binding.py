"""kv_store by the C code in cpu.c, for CPUs with AVX2 or AVX-512; shapes and types are checked by its caller."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.kernels.cpu_library import CpuLibrary

LIBRARY = CpuLibrary(Path(__file__).with_name("cpu.c"), "tandem_kv_store")
_DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16


def takes(k: Tensor, v: Tensor, layer_view: Tensor) -> bool:
    """True if the C code is available and has this case: float32 or bfloat16, whole vectors."""
    has_types = k.dtype is v.dtype and k.dtype in _DTYPES and layer_view.dtype in _DTYPES
    return has_types and k.shape[2] % _LANES == 0 and LIBRARY.is_available()


def kv_store_native(k: Tensor, v: Tensor, layer_view: Tensor, slot_mapping: Tensor) -> None:
    """See `kv_store`; for cases that `takes` accepts. One thread."""
    tokens, heads, width = k.shape
    k, v = _with_whole_rows(k), _with_whole_rows(v)
    slot_mapping = slot_mapping.contiguous()
    blocks, planes, between_heads = layer_view.stride()[:3]
    number_bytes = layer_view.element_size()
    is_outside = LIBRARY.call((
        k.data_ptr(), v.data_ptr(), layer_view.data_ptr(), slot_mapping.data_ptr(),
        tokens, heads, width, layer_view.shape[3], layer_view.shape[0], k.stride(0), v.stride(0),
        blocks * number_bytes, planes * number_bytes, between_heads * number_bytes,
        k.dtype is torch.bfloat16, layer_view.dtype is torch.bfloat16,
    ))  # fmt: skip
    if is_outside:
        raise IndexError("slot_mapping names slots that the pool does not have")


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
