"""Rotary positions: the frequencies of each kind and the table that the decoder reads. Su et al. 2021."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.engine.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of a head: fp32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(rope, frequencies) if rope.kind == "llama3" else frequencies


def rotation_table(rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of positions 0 … positions-1: `dtype` [positions, 2, head_dim], on the CPU.

        [:, 0]  cos a0 … cos a(h-1)   cos a0 … cos a(h-1)        h = head_dim / 2
        [:, 1] -sin a0 … -sin a(h-1)  sin a0 … sin a(h-1)

    With the sign in the table a rotation is x·cos + swap(x)·sin, where swap exchanges the halves of a head.
    Computed in fp32 and then rounded, as transformers does.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(dtype)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_stretched = rope.original_max_positions / rope.low_freq_factor
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > shortest_stretched, frequencies / rope.factor, frequencies)
    share = (rope.original_max_positions / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    is_between = (waves >= longest_kept) & (waves <= shortest_stretched)
    return torch.where(is_between, blended, stretched)
