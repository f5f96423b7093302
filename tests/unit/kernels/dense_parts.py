"""Parts of a small dense layer in bfloat16, plain or quantised."""

from __future__ import annotations

import torch

from tandem.kernels.dense_row import LayerParts
from tandem.kernels.packed_linear import PackedLinear
from tandem.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, Unpacked

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 6, 2, 32, 160, 448


def parts(randn, *, has_bias: bool, bits: int = 16) -> LayerParts:
    def product(columns: int, inner: int) -> PackedLinear | QuantizedLinear:
        bias = randn(columns, dtype=torch.bfloat16) if has_bias else None
        weight = (randn(columns, inner) / inner**0.5).bfloat16()
        if bits == 16:
            return PackedLinear(weight, bias)
        return QuantizedLinear(QuantizedWeight(weight, bits), bias, unpacked=Unpacked())

    return LayerParts(
        input_norm=1 + randn(WIDTH, dtype=torch.bfloat16) / 4, mlp_norm=1 + randn(WIDTH, dtype=torch.bfloat16) / 4,
        qkv=product((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH), o=product(WIDTH, HEADS * HEAD_DIM),
        gate_up=product(2 * INNER, WIDTH), down=product(WIDTH, INNER), turning=HEADS + KV_HEADS, head_dim=HEAD_DIM,
        eps=1e-5,
    )  # fmt: skip
