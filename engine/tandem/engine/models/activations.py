"""The activations between an MLP's products: from gate and up to the input of down."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tandem.kernels.backend import REFERENCE
from tandem.kernels.silu_mul import is_native as silu_mul_is_native
from tandem.kernels.silu_mul import silu_mul

_ELEMENTWISE_GRAIN = 32768
"""torch runs an elementwise operation on fewer numbers than this as one loop, whatever the threads."""


def _silu_by_grains(gate_up: Tensor) -> Tensor:
    """`silu_mul` in pieces that torch never splits over threads.

    Where a split falls inside a row, numbers at its edge take the scalar exp instead of the vector one and differ in
    the last bit: which rows those are would depend on the batch. Half precision is written out in fp32. The C code has
    whole vectors alone.
    """
    if silu_mul_is_native(gate_up):
        return silu_mul(gate_up.contiguous())
    if gate_up.dtype is not torch.float32:
        gate, up = gate_up.chunk(2, -1)
        gate = gate.float()
        return gate.div_(gate.neg().exp_().add_(1.0)).to(up.dtype).mul_(up)
    rows = max(1, 2 * (_ELEMENTWISE_GRAIN - 1) // gate_up.shape[1])
    return torch.cat([silu_mul(piece, backend=REFERENCE) for piece in torch.split(gate_up, rows)])


def _gelu_tanh(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh approximation (Hendrycks and Gimpel 2016, section 2)."""
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _gelu_tanh_written_out(gate_up: Tensor) -> Tensor:
    """`_gelu_tanh` from operations with independent rows; torch's own is none."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.float()
    inner = (gate * gate * gate).mul_(0.044715).add_(gate).mul_(math.sqrt(2 / math.pi)).tanh_()
    return inner.add_(1.0).mul_(gate).mul_(0.5).to(up.dtype).mul_(up)


ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_tanh": _gelu_tanh}
REPEATABLE: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu_by_grains, "gelu_tanh": _gelu_tanh_written_out}
"""The same for `--deterministic`."""
