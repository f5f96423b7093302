"""A layer's experts: stacked matrices, biases, and the activation between them. Owns their shapes and the checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SILU, GELU_TANH, CLAMPED = "silu", "gelu_tanh", "clamped"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateActivation:
    """The activation of gate and up, computed in fp32.

    silu        silu(gate) · up
    gelu_tanh   gelu(gate) · up with the tanh approximation (Hendrycks and Gimpel 2016, section 2)
    clamped     (up + 1) · gate · sigmoid(alpha · gate), gate at most `limit`, up from -`limit` to `limit` (gpt-oss)
    """

    kind: str = SILU
    alpha: float = 1.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in (SILU, GELU_TANH, CLAMPED):
            raise ValueError(f"unknown gate {self.kind!r}: expected {SILU}, {GELU_TANH} or {CLAMPED}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """`count` experts, stacked along dim 0, contiguous and of one dtype.

    gate_up `[count · 2 · features, hidden]`: gate and up of the first expert, gate and up of the next, …
    down `[count · hidden, features]`; biases `[count · rows]` in the same order, or None.
    Raises ValueError (shapes) or TypeError (dtypes).
    """

    count: int
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: GateActivation = GateActivation()

    def __post_init__(self) -> None:
        hidden, features = self.gate_up.shape[1], self.down.shape[1]
        if self.gate_up.shape[0] != self.count * 2 * features or self.down.shape[0] != self.count * hidden:
            raise ValueError(
                f"{self.count} experts cannot be gate_up {tuple(self.gate_up.shape)} and down {tuple(self.down.shape)}"
            )
        named = (
            ("gate_up", self.gate_up, self.gate_up), ("down", self.down, self.down),
            ("gate_up_bias", self.gate_up_bias, self.gate_up), ("down_bias", self.down_bias, self.down),
        )  # fmt: skip
        for name, tensor, matrix in named:
            if tensor is None:
                continue
            if tensor is not matrix and tensor.shape != matrix.shape[:1]:
                raise ValueError(f"{name} must be [{matrix.shape[0]}], got {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
            if tensor.dtype is not self.gate_up.dtype:
                raise TypeError(f"{name} is {tensor.dtype}, gate_up {self.gate_up.dtype}")

    @property
    def hidden(self) -> int:
        return self.gate_up.shape[1]

    @property
    def features(self) -> int:
        return self.down.shape[1]
