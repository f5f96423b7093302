"""Block gather, scatter and copy in torch: the specification, and the CPU path.

`part` is `pool[:, layers, :, heads]`, a strided view.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_blocks_reference(part: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
    """See `gather_blocks`."""
    return torch.index_select(part, 0, block_ids, out=out)


def scatter_blocks_reference(part: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """See `scatter_blocks`."""
    part.index_copy_(0, block_ids.long(), staging)


def copy_blocks_reference(pool: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """See `copy_blocks`."""
    pool.index_copy_(0, dst_ids.long(), pool.index_select(0, src_ids))
