"""deterministic_linear in torch.

A BLAS chooses its code path, and with it the order of additions, by the shape of the product. Rows are therefore
padded with zeros to whole tiles, and every tile is one product of the same shape, all of them in one batched call that
reads the same weight. Inside one shape a row's sum does not depend on its place or its neighbours, nor a product on how
many there are in the batch: no BLAS promises that, so the tests hold it for the one in use. Output columns past the
last multiple of 16 get a product of their own, padded: on three threads and more, MKL cuts ragged ones by the batch.
There are never fewer than two tiles: MKL cuts a single product between threads, from 128 columns and 192 terms on.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_TILE = 8
"""Rows of one product. Measured with MKL in fp32: 16 is a quarter faster on long prompts, but takes 1.6 times as long
for a single row."""
COLUMN_TILE = 16


def deterministic_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `deterministic_linear`."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    tiles = max(2, -(-count // ROW_TILE))
    padded = rows.new_zeros((tiles, ROW_TILE, rows.shape[1]))
    padded.flatten(0, 1)[:count] = rows
    out = _products(padded, weight)
    if bias is not None:
        out += bias
    return out.flatten(0, 1)[:count].reshape(*x.shape[:-1], weight.shape[0])


def _products(tiles: Tensor, weight: Tensor) -> Tensor:
    ragged = weight.shape[0] % COLUMN_TILE
    whole = weight[: weight.shape[0] - ragged]
    products = torch.bmm(tiles, whole.t().expand(tiles.shape[0], -1, -1))
    if not ragged:
        return products
    rest = weight.new_zeros((COLUMN_TILE, weight.shape[1]))
    rest[:ragged] = weight[-ragged:]
    last = torch.bmm(tiles, rest.t().expand(tiles.shape[0], -1, -1))
    return torch.cat([products, last[..., :ragged]], -1)
