"""Moving whole blocks, or a layer range x head range of blocks, between a KV pool and a contiguous staging buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.kv_blocks import reference

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]

_ALL = slice(None)


def gather_blocks(
    pool: Tensor,
    block_ids: Tensor,
    layers: slice = _ALL,
    heads: slice = _ALL,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Copy parts of blocks out of the pool.

    pool: `[num_blocks, layers, planes, heads, block_tokens, width]`, contiguous, any dtype. block_ids: int32 `[n]`.
    layers, heads: slices of step 1. Returns a new contiguous `[n, layers, planes, heads, block_tokens, width]`, which
    the caller owns, or `out`, which must be such a tensor. Block ids must be inside the pool; CPU raises IndexError.
    Raises ValueError or TypeError otherwise.
    """
    _check_pool(pool, block_ids)
    part = _part_of(pool, layers, heads)
    if out is not None:
        _check_staging(pool, part, block_ids, out)
    if uses_triton(pool.device, backend):
        from tandem.kernels.kv_blocks.triton import gather_blocks_triton

        return gather_blocks_triton(part, block_ids, out)
    return reference.gather_blocks_reference(part, block_ids, out)


def scatter_blocks(
    pool: Tensor,
    block_ids: Tensor,
    staging: Tensor,
    layers: slice = _ALL,
    heads: slice = _ALL,
    *,
    backend: str | None = None,
) -> None:
    """Copy a staging buffer into parts of blocks, in place: the inverse of `gather_blocks`.

    staging: contiguous `[n, layers, planes, heads, block_tokens, width]`, dtype and device of the pool. Block ids must
    be distinct: two writers of one block leave either one's bytes. Errors as in `gather_blocks`.
    """
    _check_pool(pool, block_ids)
    part = _part_of(pool, layers, heads)
    _check_staging(pool, part, block_ids, staging)
    if uses_triton(pool.device, backend):
        from tandem.kernels.kv_blocks.triton import scatter_blocks_triton

        scatter_blocks_triton(part, block_ids, staging)
    else:
        reference.scatter_blocks_reference(part, block_ids, staging)


def copy_blocks(pool: Tensor, src_ids: Tensor, dst_ids: Tensor, *, backend: str | None = None) -> None:
    """Copy whole blocks inside the pool, in place (copy-on-write).

    src_ids, dst_ids: int32 `[n]`. Destinations must be distinct and none of them a source of the same call: copies run
    in any order. Errors as in `gather_blocks`.
    """
    _check_pool(pool, src_ids)
    _check_pool(pool, dst_ids)
    if src_ids.shape != dst_ids.shape:
        raise ValueError(f"{src_ids.shape[0]} sources for {dst_ids.shape[0]} destinations")
    if uses_triton(pool.device, backend):
        from tandem.kernels.kv_blocks.triton import copy_blocks_triton

        copy_blocks_triton(pool, src_ids, dst_ids)
    else:
        reference.copy_blocks_reference(pool, src_ids, dst_ids)


def _check_pool(pool: Tensor, block_ids: Tensor) -> None:
    if pool.dim() != 6 or not pool.is_contiguous():
        raise ValueError(
            "pool must be contiguous [num_blocks, layers, planes, heads, block_tokens, width], "
            f"got {tuple(pool.shape)} with strides {pool.stride()}"
        )
    if block_ids.dtype != torch.int32 or block_ids.dim() != 1:
        raise TypeError(f"block ids must be int32 [n], got {block_ids.dtype} {tuple(block_ids.shape)}")


def _check_staging(pool: Tensor, part: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    expected = (block_ids.shape[0], *part.shape[1:])
    if staging.shape != expected or not staging.is_contiguous():
        raise ValueError(f"staging must be contiguous {expected}, got {tuple(staging.shape)}")
    if staging.dtype != pool.dtype:
        raise TypeError(f"staging is {staging.dtype}, pool {pool.dtype}")


def _part_of(pool: Tensor, layers: slice, heads: slice) -> Tensor:
    if layers.step not in (None, 1) or heads.step not in (None, 1):
        raise ValueError(f"layers and heads must be slices of step 1, got {layers} and {heads}")
    part = pool[:, layers, :, heads]
    if 0 in part.shape[1:]:
        raise ValueError(f"layers {layers} x heads {heads} is empty in a pool {tuple(pool.shape)}")
    return part
