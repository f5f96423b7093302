"""rms_norm in torch: the specification, and the path for cases that `cpu.c` does not cover."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, added: Tensor | None) -> Tensor:
    """See `rms_norm`."""
    if added is not None:
        x.add_(added)
    shape = [weight.shape[-1]]
    if weight.dtype is torch.float32:
        return torch.rms_norm(x, shape, weight, eps)
    return torch.rms_norm(x.float(), shape, None, eps).to(weight.dtype).mul_(weight)
