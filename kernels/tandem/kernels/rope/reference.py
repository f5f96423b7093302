"""rotate in torch: the specification, and the path for cases that `cpu.c` does not cover."""

from __future__ import annotations

from torch import Tensor


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `rotate`."""
    rows, heads, width = x.shape
    halves, shape = x.view(rows, heads, 2, -1), (rows, 1, 2, -1)
    return (halves * cos.view(shape)).add_(halves.flip(2).mul_(sin.view(shape))).view(rows, heads, width)
