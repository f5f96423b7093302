"""Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1), beside the common parts of `decoder.py`.

Keys and values of all heads are made of one latent a token, and one key that turns with its position is shared by all
heads; the two, side by side, are cached. The products that would make keys and values of latents are applied to
queries and answers instead (the paper's absorption), so that every query attends to the cached rows as they are:

    score   = (plain · Wk) · latent + turned · shared key        Wk [plain, rank] and Wv [rank, value] of a head
    answer  = (Σ weights · latent) · Wv

Over several ranks heads are split, and every rank makes and keeps the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.latent_config import LatentShape
from tandem.engine.linear import Linear
from tandem.engine.model_config import ModelConfig
from tandem.engine.weights import Parameter, TensorSplit
from tandem.kernels.deterministic_linear import deterministic_linear
from tandem.kernels.dtypes import product_dtype
from tandem.kernels.rope import rotate
from tandem.kernels.widened_linear import widened_linear

HeadProduct = Callable[[Tensor], Tensor]
"""[T, heads, in] to [T, heads, out], each head with its own matrix."""


class ParameterFactory(Protocol):
    """As `Decoder._parameter`."""

    def __call__(
        self,
        *named: tuple[str, int],
        columns: int | None = None,
        split: TensorSplit = TensorSplit.WHOLE,
        kind: str = "weight",
        replicas: int = 1,
    ) -> Parameter: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentParameters:
    """Parameters of one layer. `down` is [queries or their source | latent | shared key], `down_bias` the same or
    without the queries; the others stand between it and attention."""

    down: Parameter
    down_bias: Parameter | None
    q_norm: Parameter | None
    q_up: Parameter | None
    kv_norm: Parameter
    kv_up: Parameter

    @classmethod
    def of(cls, config: ModelConfig, name: str, make: ParameterFactory, tp_size: int) -> LatentParameters:
        """Of the attention called `name`, which must be of this kind in the model."""
        assert config.latent is not None
        shape, hidden, heads, has_bias = config.latent, config.hidden, config.heads, config.has_qkv_bias
        queries, rank = heads * shape.query, shape.query_rank
        latent = (f"{name}.kv_a_proj_with_mqa", shape.width)
        kv_norm = make((f"{name}.kv_a_layernorm", shape.rank))
        kv_up = make(
            (f"{name}.kv_b_proj", heads * (shape.plain + shape.value)), columns=shape.rank, split=TensorSplit.ROWS
        )  # fmt: skip
        if rank is None:
            down = make((f"{name}.q_proj", queries), latent, columns=hidden, split=TensorSplit.ROWS, replicas=tp_size)
            bias = make(latent, kind="bias") if has_bias else None
            return cls(down=down, down_bias=bias, q_norm=None, q_up=None, kv_norm=kv_norm, kv_up=kv_up)
        made_of = (f"{name}.q_a_proj", rank)
        return cls(
            down=make(made_of, latent, columns=hidden),
            down_bias=make(made_of, latent, kind="bias") if has_bias else None,
            q_norm=make((f"{name}.q_a_layernorm", rank)),
            q_up=make((f"{name}.q_b_proj", queries), columns=rank, split=TensorSplit.ROWS),
            kv_norm=kv_norm,
            kv_up=kv_up,
        )

    def members(self) -> list[Parameter]:
        """Without `down` and its bias, which stand in the place of other models' q, k and v."""
        return [one for one in (self.q_norm, self.q_up, self.kv_norm, self.kv_up) if one is not None]

    def arrange(self, shape: LatentShape, heads: int) -> None:
        """Bring loaded weights into the order of `LatentAttention`: halves that turn together instead of neighbours,
        and a bias as long as `down`. `heads` of this rank."""
        turned = torch.arange(shape.turned)
        if shape.is_interleaved:
            turned = turned.view(-1, 2).t().flatten()
        plain = torch.arange(shape.plain)
        of_heads = (torch.arange(heads)[:, None] * shape.query + torch.cat((plain, shape.plain + turned))).flatten()
        latent = torch.cat((torch.arange(shape.rank), shape.rank + turned))
        if self.q_up is None:
            first = of_heads
        else:
            first = torch.arange(self.down.tensor.shape[0] - shape.width)
            _reorder(self.q_up, of_heads)
        order = torch.cat((first, len(first) + latent))
        if self.down_bias is not None:
            bias = self.down_bias.tensor
            self.down_bias.tensor = torch.cat((bias.new_zeros(len(order) - len(bias)), bias))
            _reorder(self.down_bias, order)
        _reorder(self.down, order)

    def head_products(
        self, shape: LatentShape, heads: int, *, is_deterministic: bool
    ) -> tuple[HeadProduct, HeadProduct]:
        """Return the products into the latent space (queries) and out of it (answers); `kv_up` is given up for them."""
        keys, values = self.kv_up.tensor.view(heads, -1, shape.rank).split_with_sizes((shape.plain, shape.value), 1)
        self.kv_up.tensor = self.kv_up.tensor.to("meta")
        product = _head_product_by_tiles if is_deterministic else _head_product
        return partial(product, weight=keys.transpose(1, 2)), partial(product, weight=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One layer's, ready to run on one rank; `heads` of it. `make_queries` is None where they come from `hidden`."""

    shape: LatentShape
    heads: int
    make_queries: Linear | None
    norm: Callable[[Tensor], Tensor]
    into_latent: HeadProduct
    out_of_latent: HeadProduct
    backend: str | None

    def project(self, down: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`down` [T, queries | rank | turned] to queries [T, heads, width] and the rows to cache [T, 1, width], which
        are keys and values; cos, sin: [T, turned]."""
        shape = self.shape
        sizes = (down.shape[1] - shape.width, shape.rank, shape.turned)
        made_of, latent, key = down.split_with_sizes(sizes, 1)
        q = made_of if self.make_queries is None else self.make_queries(made_of.contiguous())
        plain, turning = q.view(-1, self.heads, shape.query).split_with_sizes((shape.plain, shape.turned), 2)
        turned = rotate(torch.cat((turning, key[:, None]), 1), cos, sin, backend=self.backend)
        queries = torch.cat((self.into_latent(plain), turned[:, : self.heads]), -1)
        rows = torch.cat((self.norm(latent.contiguous())[:, None], turned[:, self.heads :]), -1)
        return queries, rows, rows

    def answers(self, mixed: Tensor) -> Tensor:
        """Attention's answers over cached rows, [T, heads, rank or more], to [T, heads · value]."""
        return self.out_of_latent(mixed[..., : self.shape.rank]).flatten(1)


def _reorder(parameter: Parameter, order: Tensor) -> None:
    parameter.tensor = parameter.tensor.index_select(0, order.to(parameter.tensor.device))


def _head_product(x: Tensor, *, weight: Tensor) -> Tensor:
    """weight: [heads, out, in]."""
    if product_dtype(x.dtype, x.device) is not x.dtype:
        heads = zip(x.unbind(1), weight.unbind(0), strict=True)
        return torch.stack([widened_linear(rows, matrix) for rows, matrix in heads], 1)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def _head_product_by_tiles(x: Tensor, *, weight: Tensor) -> Tensor:
    """The same where a row's result must not depend on the others."""
    heads = zip(x.unbind(1), weight.unbind(0), strict=True)
    return torch.stack([deterministic_linear(rows, matrix) for rows, matrix in heads], 1)
