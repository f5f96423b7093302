"""A weight in bfloat16 that C code multiplies with rows, each as if it were alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.backend import uses_native
from tandem.kernels.cpu_library import CpuLibrary
from tandem.kernels.deterministic_linear.reference import deterministic_linear_reference

LIBRARY = CpuLibrary(Path(__file__).with_name("cpu.c"), "tandem_deterministic_linear")
_BLOCK, _LANES = 64, 16
_CONVERTED = 1 << 20
"""Numbers of a weight that torch has in float32 at once."""
_CPU = torch.device("cpu")


class RepeatableLinear:
    """x · weightᵀ + bias, bitwise the same for a row whatever its neighbours, its place and the number of rows.

    `weight`: `[columns, inner]`, bfloat16 on the CPU, which is copied; `bias`: `[columns]` or None. A call takes
    `[rows, inner]` and returns `[rows, columns]` in bfloat16, owned by the caller, with sums in float32 that are
    rounded once. Where there is no C code, which needs AVX-512 and an even `inner`, torch converts the weight at each
    call. Thread-safe.
    """

    __slots__ = ("_bias", "_weight", "columns", "inner", "is_native")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.columns, self.inner = weight.shape
        self.is_native = self.inner % 2 == 0 and uses_native(_CPU) and LIBRARY.is_available()
        self._weight = _packed(weight) if self.is_native else weight.clone()
        self._bias = bias
        if self.is_native and bias is not None:
            self._bias = functional.pad(bias, (0, -self.columns % _LANES)).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.is_native:
            return self._by_torch(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, columns = x.shape[0], self.columns + -self.columns % _LANES
        out = torch.empty((rows, columns), dtype=torch.bfloat16)
        if rows:
            LIBRARY.call((
                x.data_ptr(), self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(),
                out.data_ptr(), rows, self.inner, columns, x.stride(0), _BLOCK, self.inner * _BLOCK,
                torch.get_num_threads(),
            ))  # fmt: skip
        return out if columns == self.columns else out[:, : self.columns].contiguous()

    def _by_torch(self, x: Tensor) -> Tensor:
        out = torch.empty((x.shape[0], self.columns), dtype=x.dtype)
        step = max(1, _CONVERTED // self.inner // _LANES) * _LANES
        for low in range(0, self.columns, step):
            some = slice(low, min(low + step, self.columns))
            bias = None if self._bias is None else self._bias[some].float()
            out[:, some] = deterministic_linear_reference(x.float(), self._weight[some].float(), bias)
        return out


def _packed(weight: Tensor) -> Tensor:
    """`[columns / 64][inner / 2][64][2]`, the last block filled up with zeros; see cpu.c of `packed_linear`."""
    columns, inner = weight.shape
    padded = functional.pad(weight, (0, 0, 0, -columns % _BLOCK))
    return padded.view(-1, _BLOCK, inner // 2, 2).transpose(1, 2).contiguous()
