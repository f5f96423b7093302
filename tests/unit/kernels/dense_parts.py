"""Parts of a small dense layer in bfloat16, plain or quantised, and the layer made of them."""

import torch

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels.fused_layer import DenseRow, LayerParts, fuse
from tandem.kernels.prepacked_linear import PrepackedLinear
from tandem.kernels.quantized_linear import FORMATS, QuantizedLinear, QuantizedWeight
from tests.unit.kernels.levels import require

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 6, 2, 32, 160, 448


def parts(
    randn, *, has_bias: bool, bits: int = 16, row_bits: int = 8, width: int = WIDTH, inner: int = INNER,
    heads: int = HEADS, kv_heads: int = KV_HEADS, mixed_heads: int = HEADS,
) -> LayerParts:  # fmt: skip
    """`mixed_heads` is what o takes: other than `heads` in a layer that contradicts itself."""

    def product(columns: int, inner: int) -> PrepackedLinear | QuantizedLinear:
        bias = randn(columns, dtype=torch.bfloat16) if has_bias else None
        weight = (randn(columns, inner) / inner**0.5).bfloat16()
        if bits == 16:
            return PrepackedLinear(weight, bias)
        (kind,) = [one for one in FORMATS.values() if (one.bits, one.row_bits) == (bits, row_bits)]
        quantised = QuantizedWeight(weight, bits, randn(inner).exp(), kind.outliers_of(inner))
        return QuantizedLinear(quantised, bias, row_bits=row_bits)

    return LayerParts(
        input_norm=1 + randn(width, dtype=torch.bfloat16) / 4, mlp_norm=1 + randn(width, dtype=torch.bfloat16) / 4,
        qkv=product((heads + 2 * kv_heads) * HEAD_DIM, width), o=product(width, mixed_heads * HEAD_DIM),
        gate_up=product(2 * inner, width), down=product(width, inner), turning=heads + kv_heads, head_dim=HEAD_DIM,
        eps=1e-5,
    )  # fmt: skip


def fused(layer: LayerParts) -> DenseRow:
    """`fuse`, which must find its code where the CPU has the level that the products need: with AVX-512, but without
    AVX512-BF16, oneDNN packs bfloat16 in another way than the C code reads, and few rows of 8 bits need VNNI."""
    is_quantized = any(isinstance(one, QuantizedLinear) for one in (layer.qkv, layer.o, layer.gate_up, layer.down))
    if cpu_level() is not CpuLevel.AVX2:
        require(CpuLevel.AVX512VNNI if is_quantized else CpuLevel.AVX512BF16)
    row = fuse(layer)
    assert row is not None, "oneDNN packs in another way"
    return row
