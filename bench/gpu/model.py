"""A small decoder with random weights, just enough of one to run the kernels in their places.

Owns nothing of the engine on purpose: it shows that the kernels work together, and the cost of a decode step with them,
independently of scheduler, weights and samplers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.cases import Heads
from tandem.kernels.extend_attention import extend_attention
from tandem.kernels.kv_store import kv_store
from tandem.kernels.paged_decode import paged_decode
from tandem.kernels.rms_norm import rms_norm
from tandem.kernels.rope import rotate
from tandem.kernels.silu_mul import silu_mul

BLOCK_TOKENS = 16
_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    heads: Heads
    ffn: int
    vocab: int


@dataclass(slots=True, kw_only=True)
class Step:
    """Inputs of one forward pass; `cu_seqlens` None means one query a sequence."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_seqlens: Tensor | None = None


class Decoder:
    """Embedding, then per layer rmsnorm, qkv, rope, kv_store, attention, gated MLP; logits of every token."""

    def __init__(self, shape: Shape, *, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        heads = shape.heads

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device, dtype=dtype).mul_(columns**-0.5)

        self.embedding = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype)
        self.qkv = [weight((heads.q + 2 * heads.kv) * heads.width, shape.hidden) for _ in range(shape.layers)]
        self.out = [weight(shape.hidden, heads.q * heads.width) for _ in range(shape.layers)]
        self.gate_up = [weight(2 * shape.ffn, shape.hidden) for _ in range(shape.layers)]
        self.down = [weight(shape.hidden, shape.ffn) for _ in range(shape.layers)]
        self.head = weight(shape.vocab, shape.hidden)
        self.pool = torch.zeros(
            (num_blocks, shape.layers, 2, heads.kv, BLOCK_TOKENS, heads.width), device=device, dtype=dtype
        )
        self.norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.inverse_frequencies = 10000.0 ** (-torch.arange(0, heads.width, 2, device=device) / heads.width)

    def weight_bytes(self) -> int:
        """Bytes of weights that a step of any batch reads."""
        matrices = [*self.qkv, *self.out, *self.gate_up, *self.down, self.head]
        return sum(matrix.numel() * matrix.element_size() for matrix in matrices)

    def forward(self, step: Step, backend: str) -> Tensor:
        heads, count = self.shape.heads, step.tokens.shape[0]
        scale = heads.width**-0.5
        x = functional.embedding(step.tokens, self.embedding)
        angles = (step.positions[:, None].float() * self.inverse_frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(self.dtype), angles.sin()
        sin[:, : heads.width // 2].neg_()
        sin = sin.to(self.dtype)
        added = None
        for layer in range(self.shape.layers):
            normed = rms_norm(x, self.norm, _EPS, added=added, backend=backend)
            qkv = functional.linear(normed, self.qkv[layer]).view(count, -1, heads.width)
            turned, v = qkv.split_with_sizes((heads.q + heads.kv, heads.kv), 1)
            q, k = rotate(turned, cos, sin, backend=backend).split_with_sizes((heads.q, heads.kv), 1)
            view = self.pool[:, layer]
            kv_store(k, v, view, step.slots, backend=backend)
            if step.cu_seqlens is None:
                mixed = paged_decode(q, view, step.block_table, step.context_lens, scale=scale, backend=backend)
            else:
                mixed = extend_attention(
                    q, view, step.cu_seqlens, step.block_table, step.context_lens, scale=scale, backend=backend
                )
            added = functional.linear(mixed.reshape(count, -1), self.out[layer])
            normed = rms_norm(x, self.norm, _EPS, added=added, backend=backend)
            added = functional.linear(
                silu_mul(functional.linear(normed, self.gate_up[layer]), backend=backend), self.down[layer]
            )
        return functional.linear(rms_norm(x, self.norm, _EPS, added=added, backend=backend), self.head)
