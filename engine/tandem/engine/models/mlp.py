"""A dense feed-forward: gate and up in one product, an activation, and down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.engine.linear import Linear
from tandem.engine.weights import Parameter, TensorSplit
from tandem.kernels.quantized_linear import QuantizedLinear
from tandem.kernels.silu_mul import silu_mul


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
