"""Random paged caches with hostile padding, and a naive dense attention in float64 to hold every kernel against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """Sequences with keys and values `[length, kv_heads, width]` that are also stored in a paged layer view.

    Unwritten slots hold NaN, table entries past the end of a sequence hold -1.
    """

    keys: list[Tensor]
    values: list[Tensor]
    pool: Tensor
    layer_view: Tensor
    block_table: Tensor
    context_lens: Tensor

    def slots(self, sequence: int) -> list[int]:
        block_tokens = self.layer_view.shape[3]
        row = self.block_table[sequence].tolist()
        length = int(self.context_lens[sequence])
        return [row[t // block_tokens] * block_tokens + t % block_tokens for t in range(length)]

    def only(self, sequence: int) -> PagedCase:
        """One of its sequences."""
        return replace(
            self, keys=[self.keys[sequence]], values=[self.values[sequence]],
            block_table=self.block_table[sequence, None], context_lens=self.context_lens[sequence, None],
        )  # fmt: skip

    def without_blocks_before(self, window: int) -> PagedCase:
        """The same with table entries that left the window of the last token set to -1."""
        table = self.block_table.clone()
        for row, length in zip(table, self.context_lens.tolist(), strict=True):
            row[: max(0, length - window) // self.layer_view.shape[3]] = -1
        return replace(self, block_table=table)


def build_case(
    lens: list[int],
    *,
    kv_heads: int = 2,
    width: int = 16,
    block_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    layers: int = 3,
    layer: int = 1,
    seed: int = 0,
) -> PagedCase:
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_tokens) for length in lens]
    num_blocks = sum(blocks) + 2
    free = torch.randperm(num_blocks, generator=generator).tolist()
    pool = torch.full((num_blocks, layers, 2, kv_heads, block_tokens, width), float("nan"), dtype=dtype)
    table = torch.full((len(lens), max(blocks, default=0) + 2), -1, dtype=torch.int32)
    keys, values = [], []
    for sequence, length in enumerate(lens):
        k, v = torch.randn(2, length, kv_heads, width, generator=generator).to(dtype)
        keys.append(k)
        values.append(v)
        for index in range(blocks[sequence]):
            block = free.pop()
            table[sequence, index] = block
            low, high = index * block_tokens, min((index + 1) * block_tokens, length)
            pool[block, layer, 0, :, : high - low] = k[low:high].transpose(0, 1)
            pool[block, layer, 1, :, : high - low] = v[low:high].transpose(0, 1)
    return PagedCase(
        keys=keys, values=values, pool=pool, layer_view=pool[:, layer], block_table=table,
        context_lens=torch.tensor(lens, dtype=torch.int32),
    )  # fmt: skip


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of the last `len(q)` tokens of one sequence, head by head and token by token, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for token in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + token
        low = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            seen = slice(low, position + 1)
            scores = k[seen, head // group].double() @ q[token, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None].double()))
            weights = torch.softmax(scores, 0)[: position + 1 - low]
            out[token, head] = weights @ v[seen, head // group].double()
    return out


def ragged_attention(q: Tensor, starts: list[int], case: PagedCase, **options: Any) -> Tensor:
    """`dense_attention` of every sequence, in the dtype of `q`."""
    parts = [
        dense_attention(q[starts[i] : starts[i + 1]], case.keys[i], case.values[i], **options)
        for i in range(len(starts) - 1)
    ]
    return torch.cat(parts).to(q.dtype)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def paged() -> Callable[..., PagedCase]:
    return build_case


@pytest.fixture
def expected_attention() -> Callable[..., Tensor]:
    return ragged_attention


@pytest.fixture
def randn() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1234)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw
