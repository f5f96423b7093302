"""The KV memory of one rank: one pool tensor a KV group, and copies of its blocks in host memory.

Owns allocation and views. The ledger knows the holders of blocks.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.core.errors import StartupError
from tandem.core.kv_layout import KVGroupSpec, KVLayout
from tandem.core.logs import event
from tandem.engine.pool_plan import human_size
from tandem.kernels.cpu_memory import map_zeroed
from tandem.kernels.dtypes import TORCH_DTYPES
from tandem.kernels.kv_blocks import gather_blocks, scatter_blocks
from tandem.kernels.layer_view import key_value_view

_log = logging.getLogger(__name__)
PIECE_BYTES = 16 << 20
"""Bytes gathered on the device at once."""


class KVPools:
    """Pool tensors `[num_blocks, group_layers, planes, heads_local, block_tokens, width]`, one a group, zeroed.

    `layer_views[layer]` is `[num_blocks, 2, heads_local, block_tokens, width]` of a model layer, keys and values in the
    same memory where the group has one plane, and `group_of_layer[layer]` its group. Allocated once; lives as long as
    the rank; on a CPU its bytes take memory when touched. Raises StartupError if the device has not the memory.
    """

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int], device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = tuple(num_blocks)
        self.tensors = tuple(
            _allocate(group, count, layout.tp, device)
            for group, count in zip(layout.groups, self.num_blocks, strict=True)
        )
        views: dict[int, tuple[int, Tensor]] = {}
        for group, tensor in zip(layout.groups, self.tensors, strict=True):
            for index, layer in enumerate(group.layers):
                if layer in views:
                    raise ValueError(f"layer {layer} is in two KV groups")
                views[layer] = (int(group.group), key_value_view(tensor[:, index]))
        if sorted(views) != list(range(len(views))):
            raise ValueError(f"KV groups must cover layers 0, 1, … without gaps, got {sorted(views)}")
        self.group_of_layer = tuple(views[layer][0] for layer in range(len(views)))
        self.layer_views = tuple(views[layer][1] for layer in range(len(views)))

    def pool_bytes(self, group: int) -> memoryview:
        """A writable view of the whole pool of `group` as bytes, without a copy; it keeps the memory alive.

        CPU pools only (ValueError otherwise). Any thread may use it; the ledger decides which blocks may be written.
        """
        tensor = self.tensors[group]
        if tensor.device.type != "cpu":
            raise ValueError(f"the pool is on {tensor.device}; only CPU memory has a memoryview")
        raw = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        raw.owner = tensor  # type: ignore[attr-defined]  # the view holds `raw`, which holds the tensor
        return memoryview(raw).cast("B")


class PoolCopies:
    """A `HostCopies` over the pools of one rank. Host memory is pinned where the pools are on a CUDA device.

    Works on a few blocks at a time, for gathering them on the device takes memory there, too; on the current stream,
    like the steps before and behind, and waits for it: blocks that are given away may be written on other streams.
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


def _allocate(group: KVGroupSpec, count: int, tp: int, device: torch.device) -> Tensor:
    """Zeroed, because masked attention multiplies what it ignores by 0, and 0 · NaN is NaN."""
    shape = (count, len(group.layers), group.planes, group.heads_local(tp), group.block_tokens, group.width)
    dtype = TORCH_DTYPES[group.dtype]
    try:
        if device.type == "cpu":
            return torch.frombuffer(map_zeroed(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (OSError, OverflowError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise StartupError(
            f"cannot allocate {human_size(count * group.block_bytes(tp))} of KV memory on {device}",
            why=str(error).splitlines()[0],
            todo="lower --kv-memory",
        ) from error
