"""RMSNorms of a decoder: of the residual stream, and of query and key heads."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.rms_norm import rms_norm


class Norm:
    """RMSNorm in fp32; see `_scaled` for the weight."""

    __slots__ = ("_backend", "_dtype", "_eps", "_weight")

    def __init__(
        self, weight: Tensor, eps: float, backend: str | None, *, has_unit_offset: bool = False, is_float: bool = False
    ) -> None:
        self._weight = weight.float() + 1.0 if has_unit_offset else weight.float() if is_float else weight
        self._dtype, self._eps, self._backend = weight.dtype, eps, backend

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Of x [T, hidden]; with `added`, x becomes their sum first."""
        if self._weight.dtype is self._dtype:
            return rms_norm(x, self._weight, self._eps, added=added, backend=self._backend)
        if added is not None:
            x.add_(added)
        return _scaled(torch.rms_norm(x.float(), [x.shape[-1]], None, self._eps), self._weight, self._dtype)


class HeadNorm:
    """A norm of every query and key head: weight [heads, head_dim], the same row for all heads of a kind."""

    __slots__ = ("_dtype", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float, *, has_unit_offset: bool = False) -> None:
        self._weight = weight.float() + 1.0 if has_unit_offset else weight
        self._dtype, self._eps, self._shape = weight.dtype, eps, [weight.shape[-1]]

    def __call__(self, x: Tensor) -> Tensor:
        return _scaled(torch.rms_norm(x.float(), self._shape, None, self._eps), self._weight, self._dtype)


def _scaled(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `normed`, written over, times `weight`, in `dtype`: Gemma's weights of 1 + w and gpt-oss's are fp32 and
    multiply before rounding, those of all other families after it."""
    return normed.mul_(weight).to(dtype) if weight.dtype is torch.float32 else normed.to(dtype).mul_(weight)
