"""A linear layer with a result for a row that does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.deterministic_linear.packed import RepeatableLinear
from tandem.kernels.deterministic_linear.reference import ROW_TILE, deterministic_linear_reference

__all__ = ["ROW_TILE", "RepeatableLinear", "deterministic_linear"]


def deterministic_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, bitwise the same for a row whatever its neighbours, its place and the number of rows.

    x: `[..., in_features]`; weight: `[out_features, in_features]`; bias: `[out_features]` or None; all of one dtype.
    Returns `[..., out_features]`. Raises ValueError (shapes) or TypeError (dtypes). Runs torch on the tensors' device;
    the promise is tested on CPU, with one to three threads. Half precision is computed in fp32 and rounded once:
    `RepeatableLinear` does so without converting the weight at every call.
    """
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}")
    if x.dtype is not torch.float32:
        wide = None if bias is None else bias.float()
        return deterministic_linear_reference(x.float(), weight.float(), wide).to(x.dtype)
    return deterministic_linear_reference(x, weight, bias)
