"""Random paged caches for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention shape of a model."""

    q: int
    kv: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A pool in which every sequence owns scattered blocks. `[blocks, layers, planes, heads, block_tokens, width]`."""

    pool: Tensor
    block_table: Tensor
    context_lens: Tensor

    def bytes_read(self) -> int:
        """Key and value bytes of all sequences in one layer."""
        _, _, planes, heads, _, width = self.pool.shape
        return int(self.context_lens.sum()) * planes * heads * width * self.pool.element_size()


def random_cache(
    lens: list[int],
    heads: Heads,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_tokens: int = 16,
    layers: int = 1,
    spare_blocks: int = 0,
    planes: int = 2,
) -> Cache:
    """Sequences of `lens` tokens. `spare_blocks` more than needed push block offsets apart."""
    counts = [-(-length // block_tokens) for length in lens]
    num_blocks = sum(counts) + 1 + spare_blocks
    pool = torch.empty((num_blocks, layers, planes, heads.kv, block_tokens, heads.width), dtype=dtype, device=device)
    pool.normal_()
    order = torch.randperm(num_blocks, device="cpu").to(torch.int32)
    table = torch.zeros((len(lens), max(counts)), dtype=torch.int32)
    start = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = order[start : start + count]
        start += count
    return Cache(
        pool=pool,
        block_table=table.to(device),
        context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
    )


def starts_of(counts: list[int], device: torch.device) -> Tensor:
    """`cu_seqlens` of sequences with `counts` query tokens."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
