"""Writing new keys and values into a paged layer view."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.cpu_library import DTYPES, LANES, library_of
from tandem.kernels.kv_store.reference import kv_store_reference
from tandem.kernels.layer_view import check_dtypes, check_layer_view

__all__ = ["LIBRARY", "kv_store"]

LIBRARY = library_of("kv_store")


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
    has_types = k.dtype is v.dtype and k.dtype in DTYPES and layer_view.dtype in DTYPES
    if uses_triton(k.device, backend):
        from tandem.kernels.kv_store.triton import kv_store_triton

        kv_store_triton(_with_whole_rows(k), _with_whole_rows(v), layer_view, slot_mapping)
    elif has_types and k.shape[2] % LANES == 0 and LIBRARY.serves(k.device, backend):
        _store_by_code(_with_whole_rows(k), _with_whole_rows(v), layer_view, slot_mapping.contiguous())
    else:
        kv_store_reference(k, v, layer_view, slot_mapping)


def _store_by_code(k: Tensor, v: Tensor, layer_view: Tensor, slot_mapping: Tensor) -> None:
    """On one thread."""
    blocks, planes, between_heads = layer_view.stride()[:3]
    number_bytes = layer_view.element_size()
    is_outside = LIBRARY.call((
        k.data_ptr(), v.data_ptr(), layer_view.data_ptr(), slot_mapping.data_ptr(),
        *k.shape, layer_view.shape[3], layer_view.shape[0], k.stride(0), v.stride(0),
        blocks * number_bytes, planes * number_bytes, between_heads * number_bytes,
        k.dtype is torch.bfloat16, layer_view.dtype is torch.bfloat16,
    ))  # fmt: skip
    if is_outside:
        raise IndexError("slot_mapping names slots that the pool does not have")


def _with_whole_rows(x: Tensor) -> Tensor:
    """A slice of a fused projection keeps its token stride; anything else is copied."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
