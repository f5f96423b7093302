"""kv_store in torch: the specification, and the CPU path for cases that `cpu.c` does not cover."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.layer_view import KEY_PLANE, VALUE_PLANE, is_shared


def kv_store_reference(k: Tensor, v: Tensor, layer_view: Tensor, slot_mapping: Tensor) -> None:
    """See `kv_store`. Synchronises on an accelerator."""
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_tokens = layer_view.shape[3]
    blocks = torch.div(slot_mapping, block_tokens, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_tokens
    layer_view[:, KEY_PLANE][blocks, :, offsets] = k.to(layer_view.dtype)
    if not is_shared(layer_view):
        layer_view[:, VALUE_PLANE][blocks, :, offsets] = v.to(layer_view.dtype)
