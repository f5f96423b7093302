"""Drawing a token from scores with top-k, top-p and min-p, without sorting them and without asking the host."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.sample.reference import choose_token_reference

__all__ = ["choose_token"]


def choose_token(
    scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor, *, backend: str | None = None
) -> Tensor:
    """Return each row's token at which the falling order of its kept scores passes `uniform` of their mass.

    scores: fp32 `[n, vocab]`, the best of a row 0, none above; -inf forbids a token. Equal scores count by rising id.
    top_k: int64 `[n]`, 0 keeps all; scores equal to the k-th stay. top_p: float64 `[n]`, 1 keeps all: the smallest set
    that reaches this share of what top_k left (Holtzman et al. 2020, section 3.1). min_p: float64 `[n]`, 0 keeps all:
    tokens at least so likely as a share of the best. uniforms: float64 `[n]` in [0, 1).
    Returns int64 `[n]`. Raises ValueError (shapes) or TypeError (dtypes). Never synchronises; launches depend on shapes
    alone. Sums are float64: the same token on every device but where a uniform falls within rounding of an edge.
    """
    if scores.dim() != 2 or any(each.shape != scores.shape[:1] for each in (top_k, top_p, min_p, uniforms)):
        raise ValueError(f"scores are {tuple(scores.shape)}; the others need one number a row")
    wanted = (torch.float32, torch.int64, torch.float64, torch.float64, torch.float64)
    for tensor, dtype in zip((scores, top_k, top_p, min_p, uniforms), wanted, strict=True):
        if tensor.dtype is not dtype:
            raise TypeError(f"expected {dtype}, got {tensor.dtype}")
    if uses_triton(scores.device, backend) and scores.stride(1) == 1:
        from tandem.kernels.sample.triton import choose_token_triton

        return choose_token_triton(scores, top_k, top_p, min_p, uniforms)
    return choose_token_reference(scores, top_k, top_p, min_p, uniforms)
