"""silu_mul in torch: the specification, and the path for cases that `cpu.c` does not cover."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """See `silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
