"""Copies blocks of the KV pools to host memory and back, a few at a time: gathering them on the device takes memory
there, too."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.core.logs import event
from tandem.engine.kv_pool import KVPools
from tandem.kernels.kv_blocks import gather_blocks, scatter_blocks

_log = logging.getLogger(__name__)
PIECE_BYTES = 16 << 20
"""Bytes gathered on the device at once."""


class PoolCopies:
    """A `HostCopies` over the pools of one rank. Host memory is pinned where the pools are on a CUDA device.

    Works on the current stream, like the steps before and behind, and waits for it: blocks that are given away may be
    written on other streams.
    """

    def __init__(self, pools: KVPools) -> None:
        self._pools = pools.tensors

    @torch.inference_mode()
    def save(self, group: int, blocks: Sequence[int]) -> Tensor | None:
        """Copy to `[n, group_layers, planes, heads_local, block_tokens, width]` in host memory; None if that is
        full."""
        pool, ids = self._pools[group], self._ids(group, blocks)
        try:
            host = torch.empty((len(ids), *pool.shape[1:]), dtype=pool.dtype, pin_memory=pool.is_cuda)
        except RuntimeError as error:
            event(_log, "no host memory for KV", logging.WARNING, blocks=len(ids), why=str(error).splitlines()[0])
            return None
        for piece in self._pieces(group, len(ids)):
            host[piece].copy_(gather_blocks(pool, ids[piece]), non_blocking=True)
        self._wait(pool)
        return host

    @torch.inference_mode()
    def restore(self, group: int, blocks: Sequence[int], saved: Tensor, first: int) -> None:
        """As `save` gave it; the copy may be dropped afterwards."""
        pool, ids = self._pools[group], self._ids(group, blocks)
        wanted = saved[first : first + len(ids)]
        for piece in self._pieces(group, len(ids)):
            scatter_blocks(pool, ids[piece], wanted[piece].to(pool.device, non_blocking=True))
        self._wait(pool)

    def _ids(self, group: int, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(list(blocks), dtype=torch.int32, device=self._pools[group].device)

    def _pieces(self, group: int, count: int) -> Iterator[slice]:
        size = max(1, PIECE_BYTES // self._pools[group][0].nbytes)
        return (slice(start, start + size) for start in range(0, count, size))

    @staticmethod
    def _wait(pool: Tensor) -> None:
        if pool.is_cuda:
            torch.cuda.current_stream(pool.device).synchronize()
