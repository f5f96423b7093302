"""A dense feed-forward: gate and up in one product, an activation, and down; and the activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tandem.engine.linear import Linear
from tandem.engine.weights import Parameter, TensorSplit
from tandem.kernels.backend import REFERENCE
from tandem.kernels.quantized_linear import QuantizedLinear
from tandem.kernels.silu_mul import is_native as silu_mul_is_native
from tandem.kernels.silu_mul import silu_mul

_ELEMENTWISE_GRAIN = 32768
"""torch runs an elementwise operation on fewer numbers than this as one loop, whatever the threads."""


class MakeParameter(Protocol):
    """A parameter without memory of tensors `name.kind`, each with so many rows."""

    def __call__(
        self,
        *named: tuple[str, int],
        columns: int | None = None,
        split: TensorSplit = TensorSplit.WHOLE,
        kind: str = "weight",
    ) -> Parameter: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpParameters:
    """Its tensors; gate_up is gate and up on top of each other. Intermediate features are split over the ranks."""

    gate_up: Parameter
    gate_up_bias: Parameter | None
    down: Parameter
    down_bias: Parameter | None

    def members(self) -> list[Parameter]:
        every = (self.gate_up, self.gate_up_bias, self.down, self.down_bias)
        return [member for member in every if member is not None]


def mlp_parameters(
    name: str, make: MakeParameter, *, hidden: int, intermediate: int, has_bias: bool = False
) -> MlpParameters:
    """Return the MLP of the tensors `name.gate_proj.weight` and so on."""
    gate_up = ((f"{name}.gate_proj", intermediate), (f"{name}.up_proj", intermediate))
    down = (f"{name}.down_proj", hidden)
    return MlpParameters(
        gate_up=make(*gate_up, columns=hidden, split=TensorSplit.ROWS),
        gate_up_bias=make(*gate_up, split=TensorSplit.ROWS, kind="bias") if has_bias else None,
        down=make(down, columns=intermediate, split=TensorSplit.COLUMNS),
        down_bias=make(down, kind="bias") if has_bias else None,
    )


def beside(experts: Linear, shared: Mlp) -> Linear:
    """Add a shared MLP's answer to that of `experts`, [T, hidden]; written over the first."""
    return lambda x: experts(x).add_(shared(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Ready to run: [T, hidden] to [T, hidden]."""

    gate_up: Linear
    activate: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.gate_up, QuantizedLinear) and self.activate is silu_mul:
            return self.down(self.gate_up.gated(x))
        return self.down(self.activate(self.gate_up(x)))


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
