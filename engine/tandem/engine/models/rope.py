"""Rotary positions: the frequencies of each kind and the table that the decoder reads. Su et al. 2021."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tandem.engine.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position for each pair of a head: fp32 [head_dim / 2], on the CPU.

    ValueError for dynamic positions without a settled context (`RopeConfig.for_context`).
    """
    if rope.kind == "dynamic":
        raise ValueError("dynamic positions have frequencies for one length of context alone")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return _llama3(rope, frequencies) if rope.kind == "llama3" else frequencies


def rotation_table(rope: RopeConfig, head_dim: int, positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and signed sines of positions 0 … positions-1: `dtype` [positions, 2, head_dim], on the CPU.

        [:, 0]  cos a0 … cos a(h-1)   cos a0 … cos a(h-1)        h = head_dim / 2
        [:, 1] -sin a0 … -sin a(h-1)  sin a0 … sin a(h-1)

    With the sign in the table a rotation is x·cos + swap(x)·sin, where swap exchanges the halves of a head.
    Computed in fp32 and then rounded, as transformers does. With yarn both are longer by the attention factor.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
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


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn often within the original context are kept, rare ones stretched, blended between (YaRN, 3.2)."""

    def pair_that_turns(times: float) -> float:
        wave = rope.original_max_positions / (times * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0.0
    stretched = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
