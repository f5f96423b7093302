"""Writing new keys and values into a paged layer view."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_native, uses_triton
from tandem.kernels.kv_store import binding
from tandem.kernels.kv_store.reference import kv_store_reference
from tandem.kernels.layer_view import check_dtypes, check_layer_view

__all__ = ["kv_store"]


def kv_store(k: Tensor, v: Tensor, layer_view: Tensor, slot_mapping: Tensor, *, backend: str | None = None) -> None:
    """Write `k` and `v` into `layer_view`, in place.

    k, v: `[tokens, kv_heads, width]`, token stride free, the rest contiguous.
    layer_view: `[num_blocks, 2, kv_heads, block_tokens, width]`; its dtype is the one stored in: numbers are rounded to
    the nearest, ties to even, and become infinite beyond its range. Where keys and values share memory, k and v must be
    equal.
    slot_mapping: int64 `[tokens]`, slot = block * block_tokens + offset; -1 skips the token (padding). Slots must be
    distinct and inside the view; CPU raises IndexError for one beyond it.
    Raises ValueError (shapes) or TypeError (dtypes). Launches on the current stream, never synchronises.
    """
    check_layer_view(layer_view)
    expected = (slot_mapping.shape[0], layer_view.shape[2], layer_view.shape[4])
    if k.shape != expected or v.shape != expected:
        raise ValueError(f"k and v must be {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    check_dtypes(layer_view, k=k, v=v)
    if uses_triton(k.device, backend):
        from tandem.kernels.kv_store.triton import kv_store_triton

        kv_store_triton(k, v, layer_view, slot_mapping)
    elif uses_native(k.device, backend) and binding.takes(k, v, layer_view):
        binding.kv_store_native(k, v, layer_view, slot_mapping)
    else:
        kv_store_reference(k, v, layer_view, slot_mapping)
