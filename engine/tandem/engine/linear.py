"""Matrix products with fixed weights, prepared once for the device and precision they run on; plain or quantised.

Weights are quantised at load from plain ones, one tensor at a time, on the CPU. Embedding, norms and the routers of
experts stay as they are; every other matrix that rows are multiplied with, the head among them, is quantised after it
was cut for its rank, so that each rank has scales of its own. KV stays in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tandem.core.errors import ConfigError
from tandem.engine.calibration_text import NO_TEXT
from tandem.engine.model_config import ModelConfig
from tandem.engine.weight_formats import QUANTISATIONS, QUANTISED_DTYPES, QUANTISED_FAMILIES
from tandem.kernels.float_linear import LIBRARY as FLOAT_LINEAR
from tandem.kernels.float_linear import FloatLinear
from tandem.kernels.prepacked_linear import PrepackedLinear, packs
from tandem.kernels.quantized_linear import (
    FORMATS,
    QuantizedLinear,
    QuantizedWeight,
    packed_bytes,
)

Linear = Callable[[Tensor], Tensor]
"""[tokens, in_features] to [tokens, out_features], same dtype."""


class Quantizer:
    """Makes the products of one rank's model, which one thread computes with. `calibration`: the text for its weights.

    A row's result does not depend on the other rows, bit for bit.
    """

    def __init__(self, kind: str) -> None:
        self._format = FORMATS[kind]
        self.calibration = NO_TEXT

    @property
    def calibration_tokens(self) -> int:
        """How many random tokens tell `importance` well enough: fewer choose columns with second numbers than scales of
        4 bits. 0 where weights gain nothing from it."""
        return 512 if self._format.bits == 4 else 64 if self._format.outliers else 0

    @property
    def uses_products(self) -> bool:
        """True where weights gain from mean products of inputs, and so from a text: random tokens do not tell them."""
        return self._format.bits == 4

    def weight(self, tensor: Tensor, importance: Tensor | None = None) -> QuantizedWeight:
        """`tensor` [out_features, in_features], quantised; it may be freed. `importance`: see `QuantizedWeight`."""
        return QuantizedWeight(tensor, self._format.bits, importance, self._format.outliers_of(tensor.shape[1]))

    def linear(self, weight: QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        return QuantizedLinear(weight, bias, row_bits=self._format.row_bits)

    def bytes_of(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Memory of quantised weights of these shapes."""
        one = self._format
        return sum(packed_bytes(columns, inner + one.outliers_of(inner), one.bits) for columns, inner in shapes)


def format_of(kind: str, calibration: str = "") -> str:
    """The bits of weights and rows of `--quantize kind`, the columns with second numbers, as in "w8a16+32", and the
    digest of a `calibration` text: workers of others compute other KV."""
    if kind == "none":
        return "none"
    bits, row_bits, outliers = FORMATS[kind]
    return f"w{bits}a{row_bits}" + (f"+{outliers}" if outliers else "") + (f"@{calibration}" if calibration else "")


def quantizer_for(kind: str, config: ModelConfig, *, device: torch.device, dtype: str) -> Quantizer | None:
    """For `--quantize kind`; None for "none". Raises ConfigError, with what to do, where that cannot be computed."""
    if kind == "none":
        return None
    if kind not in QUANTISATIONS:
        raise ConfigError(f"--quantize {kind} is unknown", todo=f"use {', '.join(QUANTISATIONS)}")
    without, what = "leave --quantize out", f"--quantize {kind} cannot be used"
    if config.architecture not in QUANTISED_FAMILIES:
        known = ", ".join(sorted(name.removesuffix("ForCausalLM") for name in QUANTISED_FAMILIES))
        raise ConfigError(f"{what} with {config.architecture}", why=f"it is known for {known}", todo=without)
    if device.type != "cpu":
        raise ConfigError(
            f"{what} on {device}", why="its kernels are for the CPU", todo=f"add --device cpu, or {without}"
        )
    if dtype not in QUANTISED_DTYPES:
        raise ConfigError(
            f"{what} with {dtype}", why=f"its products are {' or '.join(QUANTISED_DTYPES)}",
            todo=f"add --dtype bfloat16, or {without}",
        )  # fmt: skip
    return Quantizer(kind)


def make_linear(
    weight: Tensor, bias: Tensor | None = None, *, is_deterministic: bool = False, quantize: Quantizer | None = None,
    importance: Tensor | None = None,
) -> Linear:  # fmt: skip
    """x · weightᵀ + bias for a `weight` of [out_features, in_features].

    On CPU, oneDNN's packed layout is up to three times as fast as torch's own call (see `bench/model_step`), and few
    rows of bfloat16 are multiplied from the same bytes by C code; below AVX-512 bfloat16 is multiplied as float32.
    float32 is multiplied by C code where there is some, which rounds half as much as oneDNN.
    With `is_deterministic` (on the CPU) a row's result does not depend on the other rows, bit for bit; then a weight in
    bfloat16 is copied, one in fp32 kept. With `quantize` (on the CPU) the weight becomes one of 8 or 4 bits, its
    errors weighted by `importance` where there is one.
    """
    if quantize is not None:
        return quantize.linear(quantize.weight(weight, importance), bias)
    if is_deterministic:
        from tandem.kernels.deterministic_linear import RepeatableLinear, deterministic_linear

        if weight.dtype is torch.bfloat16:
            return RepeatableLinear(weight, bias)
        return partial(deterministic_linear, weight=weight, bias=bias)
    if weight.device.type == "cpu" and weight.dtype is torch.float32 and FLOAT_LINEAR.serves():
        return FloatLinear(weight, bias)
    if weight.device.type == "cpu" and (packs(weight.dtype) or weight.dtype is torch.bfloat16):
        return PrepackedLinear(weight, bias)
    return partial(functional.linear, weight=weight, bias=bias)
