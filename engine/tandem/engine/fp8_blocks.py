"""Reads weights that are stored as FP8 numbers in blocks with a scale each: `name`, and `name_scale_inv`.

DeepSeek-V3, section 3.3.2: a block of 128 x 128 numbers of a matrix is multiplied by one fp32 number. It must not know
about files or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SUFFIX = "_scale_inv"
"""Behind the name of a tensor: its scales, [rows / block rows, columns / block columns], rounded up."""


class BlockScaledSlice:
    """As a safetensors slice: a shape, and rows and columns of a matrix as fp32. Holds `weight` and `scales`, which are
    such slices, too."""

    def __init__(self, weight: Any, scales: Any, blocks: tuple[int, int]) -> None:
        self._weight, self._scales, self._blocks = weight, scales, blocks

    def get_shape(self) -> list[int]:
        shape: list[int] = self._weight.get_shape()
        return shape

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """Slices of step 1. Raises ValueError where the scales are not those of the weight."""
        shape = self.get_shape()
        wanted = [-(-size // block) for size, block in zip(shape, self._blocks, strict=True)]
        if list(self._scales.get_shape()) != wanted:
            raise ValueError(f"scales of blocks of {self._blocks} must be {wanted}, not {self._scales.get_shape()}")
        rows, columns = (
            torch.arange(*one.indices(size)) // block
            for one, size, block in zip(index, shape, self._blocks, strict=True)
        )
        scales: Tensor = self._scales[:].float()
        numbers: Tensor = self._weight[index]
        return numbers.float().mul_(scales[rows[:, None], columns])
