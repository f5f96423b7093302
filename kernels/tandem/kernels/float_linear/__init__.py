"""Matrix products in float32 with a fixed weight on the CPU, as exact as float32 allows, from one packed copy of it.

Libraries sum the whole inner dimension in one chain, which rounds twice as much as chains of a few hundred numbers do:
with SmolLM2-135M, logits were 2.3e-5 (rms) from those of float64, against 1.3e-5 here and 1.2e-5 of transformers.
What that costs in time is in docs/adr/0050-float32-sums-in-parts.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.cpu_level import is_intel
from tandem.kernels.cpu_library import LANES, library_of
from tandem.kernels.cpu_memory import collect_into_huge_pages
from tandem.kernels.float_linear.reference import float_linear_reference

__all__ = ["LIBRARY", "MAX_PART", "FloatLinear"]

LIBRARY = library_of("float_linear")
MAX_PART = 288
_MAX_PART_AVX2 = 192
"""At most so many numbers are summed in one chain; shorter ones are no more exact. MKL, with which transformers
multiplies, has such parts, those of AVX2 on CPUs of other makers too, so that most of what both round is the same:
measured with SmolLM2-135M and seven texts, logits differ by at most 0.84e-4, by up to 1.4e-4 with other parts."""
_AVX2 = 1  # what tandem_choose_path answers
_DIRECT_ROWS = 6
"""More rows than that are copied, tile by tile; see cpu.c."""


class FloatLinear:
    """x · weightᵀ + bias for a `weight` `[columns, inner]` in float32 on the CPU, which is copied.

    A call takes `[rows, inner]` in float32 and returns `[rows, columns]`, owned by the caller. A row's result does not
    depend on the other rows, bit for bit, as long as the C code is not switched off in between. Thread-safe.
    """

    __slots__ = ("_bias", "_packed", "columns", "inner", "part")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.columns, self.inner = weight.shape
        self._bias = None if bias is None else bias.contiguous()
        is_short = LIBRARY.is_available() and (LIBRARY.path == _AVX2 or not is_intel())
        most = _MAX_PART_AVX2 if is_short else MAX_PART
        parts = -(-self.inner // most) or 1
        self.part = -(-self.inner // parts) or 1
        missing, panels = -self.columns % LANES, -(-self.columns // LANES)
        padded = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
        packed = padded.reshape(panels, LANES, self.inner).transpose(1, 2)
        self._packed = packed.clone(memory_format=torch.contiguous_format)
        collect_into_huge_pages(self._packed.data_ptr(), self._packed.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if not self.inner or not LIBRARY.is_available():
            plain = self._packed.transpose(1, 2).reshape(self._packed.shape[0] * LANES, self.inner)
            return float_linear_reference(x, plain[: self.columns], self._bias, self.part)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((rows, self.columns))
        room = None if rows <= _DIRECT_ROWS else torch.empty((rows + rows // _DIRECT_ROWS + 1) * self.inner)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        LIBRARY.call((
            x.data_ptr(), self._packed.data_ptr(), bias, out.data_ptr(), rows, self.inner, self.columns, x.stride(0),
            self.part, 0 if room is None else room.data_ptr(), torch.get_num_threads(),
        ))  # fmt: skip
        return out
