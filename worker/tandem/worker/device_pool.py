"""Byte access to a KV pool on a CUDA device: blocks are gathered and scattered there, and cross PCIe through pinned
host memory on a stream of their own, so that transfers do not stand in the way of steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.ids import BlockId
from tandem.core.kvlayout import KVGroupSpec
from tandem.kernels.kv_blocks import gather_blocks, scatter_blocks
from tandem.kvtransfer.pool import is_within, payload_bytes


class DevicePool:
    """A `PoolAccess` over `[num_blocks, group_layers, planes, heads_local, block_tokens, width]` on any torch device.

    Called from transfer threads. Ordering with the step that wrote the blocks: a reader waits for the work queued on
    the device's default stream at the time of the call.
    """

    def __init__(self, spec: KVGroupSpec, tp: int, pool: Tensor) -> None:
        self._spec, self._tp, self._pool = spec, tp, pool
        self._stream: torch.cuda.Stream | None = None
        if pool.is_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    @property
    def spec(self) -> KVGroupSpec:
        return self._spec

    @property
    def tp(self) -> int:
        return self._tp

    @torch.inference_mode()
    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> None:
        """Gather on the device, then one copy into `out`."""
        ids = self._ids(blocks, layers, heads, len(out))
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))
            staging = gather_blocks(self._pool, ids, _slice(layers), _slice(heads))
            flat = staging.view(-1).view(torch.uint8)
            torch.frombuffer(out, dtype=torch.uint8).copy_(flat)

    @torch.inference_mode()
    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> None:
        """One copy to the device, then scatter there; returns when the blocks are written."""
        ids = self._ids(blocks, layers, heads, len(payload))
        shape = (len(blocks), len(layers), self._spec.planes, len(heads), *self._pool.shape[-2:])
        with torch.cuda.stream(self._stream):
            host = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            staging = host.view(self._pool.dtype).view(shape).to(self._pool.device)
            scatter_blocks(self._pool, ids, staging, _slice(layers), _slice(heads))
        if self._stream is not None:
            self._stream.synchronize()

    def _ids(self, blocks: Sequence[BlockId], layers: range, heads: range, size: int) -> Tensor:
        if not is_within(layers, self._pool.shape[1]) or not is_within(heads, self._pool.shape[3]):
            raise ValueError(f"layers {layers} or heads {heads} lie outside the pool")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._pool.shape[0]:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)} lie outside the pool's {self._pool.shape[0]}")
        expected = payload_bytes(self._spec, len(blocks), layers, heads)
        if size != expected:
            raise ValueError(f"a buffer of {size} bytes for a slice of {expected}")
        return torch.tensor(blocks, dtype=torch.int32, device=self._pool.device)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
