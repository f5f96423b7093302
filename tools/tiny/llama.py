"""The training graph of the bundled model: Llama with grouped-query attention, parameters named as in Hugging Face.

Owns the forward pass and the loss; generation and serving belong to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """The shape of the model; the defaults are what ``models/tandem-tiny`` ships."""

    vocab_size: int = 4096
    hidden: int = 256
    intermediate: int = 768
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 4096


class Attention(nn.Module):
    """Causal self-attention with rotary positions over [rows, tokens, hidden]."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``cos`` and ``sin`` are [tokens, head_dim]; returns [rows, tokens, hidden]."""
        rows, tokens, _ = x.shape
        c = self.config
        q = self.q_proj(x).view(rows, tokens, c.heads, c.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, tokens, c.kv_heads, c.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, tokens, c.heads * c.head_dim))
        return merged


class SwiGlu(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, tokens, hidden] to the same shape."""
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGlu(config)
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, tokens, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers and final norm: the ``model.`` part of the Hugging Face names."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)


class TinyLlama(nn.Module):
    """The language model with the output projection tied to the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        angles = torch.outer(
            torch.arange(config.max_positions).float(),
            config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim),
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [rows, tokens, vocab] of ``ids`` [rows, tokens]."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean next-token cross entropy, in nats, of windows [rows, tokens + 1]."""
        logits = self(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                continue
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * self.config.layers) ** 0.5
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
