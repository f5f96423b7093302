"""Matrix products with fixed weights, prepared once for the device and precision they run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.quantizing import Quantizer
from tandem.kernels.packed_linear import PackedLinear, packs

Linear = Callable[[Tensor], Tensor]
"""[tokens, in_features] to [tokens, out_features], same dtype."""


def make_linear(
    weight: Tensor, bias: Tensor | None = None, *, is_deterministic: bool = False, quantize: Quantizer | None = None
) -> Linear:
    """x · weightᵀ + bias for a `weight` of [out_features, in_features].

    On CPU, oneDNN's packed layout is up to three times as fast as torch's own call (see `bench/model_step`), and few
    rows of bfloat16 are multiplied from the same bytes by C code; below AVX-512 bfloat16 is multiplied as float32.
    With `is_deterministic` (on the CPU) a row's result does not depend on the other rows, bit for bit; then a weight in
    bfloat16 is copied, one in fp32 kept. With `quantize` (on the CPU) the weight becomes one of 8 or 4 bits.
    """
    if quantize is not None:
        return quantize.linear(quantize.weight(weight), bias)
    if is_deterministic:
        from tandem.kernels.deterministic_linear import RepeatableLinear, deterministic_linear

        if weight.dtype is torch.bfloat16:
            return RepeatableLinear(weight, bias)
        return partial(deterministic_linear, weight=weight, bias=bias)
    if weight.device.type == "cpu" and (packs(weight.dtype) or weight.dtype is torch.bfloat16):
        return PackedLinear(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)
