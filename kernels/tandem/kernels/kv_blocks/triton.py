"""Block gather, scatter and copy for the GPU: one kernel that moves contiguous runs.

In `part = pool[:, layers, :, heads]` the numbers of one (block, layer, plane) are one contiguous run, and the same run
is contiguous in the staging buffer. A program moves one chunk of one run. Bytes are moved as integers of the element
size, so every dtype goes through the same code, unchanged.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK_BYTES = 8192
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _move_runs_kernel(
    part_ptr,
    ids_ptr,
    staging_ptr,
    stride_block,
    stride_layer,
    stride_plane,
    run,
    PLANES: tl.constexpr,
    CHUNK: tl.constexpr,
    SCATTER: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    layer_plane = tl.program_id(1)
    numbers = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = numbers < run
    block = tl.load(ids_ptr + item).to(tl.int64)
    layer = (layer_plane // PLANES).to(tl.int64)
    in_part = part_ptr + block * stride_block + layer * stride_layer + (layer_plane % PLANES) * stride_plane + numbers
    in_staging = staging_ptr + (item * tl.num_programs(1) + layer_plane) * run + numbers
    if SCATTER:
        tl.store(in_part, tl.load(in_staging, mask=mask), mask=mask)
    else:
        tl.store(in_staging, tl.load(in_part, mask=mask), mask=mask)


@triton.jit
def _copy_blocks_kernel(pool_ptr, src_ptr, dst_ptr, block_numbers, CHUNK: tl.constexpr):
    item = tl.program_id(0)
    numbers = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = numbers < block_numbers
    src = tl.load(src_ptr + item).to(tl.int64) * block_numbers
    dst = tl.load(dst_ptr + item).to(tl.int64) * block_numbers
    tl.store(pool_ptr + dst + numbers, tl.load(pool_ptr + src + numbers, mask=mask), mask=mask)


def gather_blocks_triton(part: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
    """See `gather_blocks`."""
    staging = out
    if staging is None:
        staging = torch.empty((block_ids.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device)
    _move_runs(part, block_ids, staging, scatter=False)
    return staging


def scatter_blocks_triton(part: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """See `scatter_blocks`."""
    _move_runs(part, block_ids, staging, scatter=True)


def copy_blocks_triton(pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """See `copy_blocks`."""
    if src_ids.shape[0] == 0:
        return
    numbers = pool[0].numel()
    chunk = _CHUNK_BYTES // pool.element_size()
    _copy_blocks_kernel[(src_ids.shape[0], triton.cdiv(numbers, chunk))](
        _as_integers(pool), src_ids, dst_ids, numbers, CHUNK=chunk, num_warps=4
    )


def _move_runs(part: Tensor, block_ids: Tensor, staging: Tensor, *, scatter: bool) -> None:
    blocks, layers, planes, heads, block_tokens, width = staging.shape
    if blocks == 0:
        return
    run = heads * block_tokens * width
    chunk = min(_CHUNK_BYTES // part.element_size(), triton.next_power_of_2(run))
    _move_runs_kernel[(blocks, layers * planes, triton.cdiv(run, chunk))](
        _as_integers(part),
        block_ids,
        _as_integers(staging),
        part.stride(0),
        part.stride(1),
        part.stride(2),
        run,
        PLANES=planes,
        CHUNK=chunk,
        SCATTER=scatter,
        num_warps=4,
    )


def _as_integers(x: Tensor) -> Tensor:
    return x.view(_INTEGER_OF_SIZE[x.element_size()])
