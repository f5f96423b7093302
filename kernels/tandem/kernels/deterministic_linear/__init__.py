"""A linear layer with a result for a row that does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.cpu_library import LANES, library_of
from tandem.kernels.deterministic_linear.reference import ROW_TILE, deterministic_linear_reference

__all__ = ["LIBRARY", "ROW_TILE", "RepeatableLinear", "deterministic_linear"]

LIBRARY = library_of("deterministic_linear")
_BLOCK = 64
_CONVERTED = 1 << 20
"""Numbers of a weight that torch has in float32 at once."""


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


class RepeatableLinear:
    """x · weightᵀ + bias, bitwise the same for a row whatever its neighbours, its place and the number of rows.

    `weight`: `[columns, inner]`, bfloat16 on the CPU, which is copied; `bias`: `[columns]` or None. A call takes
    `[rows, inner]` and returns `[rows, columns]` in bfloat16, owned by the caller, with sums in float32 that are
    rounded once. Where there is no C code, which needs AVX2 and an even `inner`, torch converts the weight at each
    call. Thread-safe.
    """

    __slots__ = ("_bias", "_weight", "columns", "inner", "is_native")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.columns, self.inner = weight.shape
        self.is_native = self.inner % 2 == 0 and LIBRARY.serves()
        self._weight = _packed(weight) if self.is_native else weight.clone()
        self._bias = bias
        if self.is_native and bias is not None:
            self._bias = functional.pad(bias, (0, -self.columns % LANES)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_native:
            return self._by_torch(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, columns = x.shape[0], self.columns + -self.columns % LANES
        out = torch.empty((rows, columns), dtype=torch.bfloat16)
        if rows:
            LIBRARY.call((
                x.data_ptr(), self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
                out.data_ptr(), rows, self.inner, columns, x.stride(0), _BLOCK, self.inner * _BLOCK, 0,
                torch.get_num_threads(),
            ))  # fmt: skip
        return out if columns == self.columns else out[:, : self.columns].contiguous()

    def _by_torch(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.columns), dtype=x.dtype)
        step = max(1, _CONVERTED // self.inner // LANES) * LANES
        for low in range(0, self.columns, step):
            some = slice(low, min(low + step, self.columns))
            bias = None if self._bias is None else self._bias[some].float()
            out[:, some] = deterministic_linear_reference(x.float(), self._weight[some].float(), bias)
        return out


def _packed(weight: Tensor) -> Tensor:
    """`[columns / 64][inner / 2][64][2]`, the last block filled up with zeros; see cpu.c of `prepacked_linear`."""
    columns, inner = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -columns % _BLOCK))
    return padded.view(-1, _BLOCK, inner // 2, 2).transpose(1, 2).contiguous()
