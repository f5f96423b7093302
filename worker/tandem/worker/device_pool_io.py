"""Byte access to a KV pool on a CUDA device: blocks are gathered and scattered there, and cross PCIe through pinned
host memory on a stream of their own, so that transfers do not delay steps."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.core.ids import BlockId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kernels import kv_payload
from tandem.kernels.kv_blocks import gather_blocks, scatter_blocks
from tandem.kvtransfer.kv_pool_access import TokenRun, is_within, payload_bytes


class DevicePool:
    """A `DeviceAccess` over `[num_blocks, group_layers, planes, heads_local, block_tokens, width]` on any torch device.

    Called from transfer threads; each keeps pinned memory for the largest payload that it has moved. The checksum is
    taken where bytes go from or into that memory. Ordering with the step that wrote the blocks: a reader waits for the
    work queued on the device's default stream at the time of the call.
    """

    def __init__(self, spec: KVGroupSpec, tp: int, pool: Tensor) -> None:
        self._spec, self._tp, self._pool = spec, tp, pool
        self._kept = threading.local()
        self._stream: torch.cuda.Stream | None = None
        if pool.is_cuda:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    @property
    def spec(self) -> KVGroupSpec:
        return self._spec

    @property
    def tp(self) -> int:
        return self._tp

    @property
    def device(self) -> str:
        return str(self._pool.device)

    @torch.inference_mode()
    def gather_into(self, source: TokenRun, layers: range, heads: range, out: Tensor, *, target_tokens: int) -> None:
        """One pass on the device where the blocks stay as they are."""
        targets = self._targets(source, layers, heads, len(out), target_tokens)
        if not len(out):
            return
        if self._pool.is_cuda:
            torch.cuda.current_stream(self._pool.device).wait_stream(torch.cuda.default_stream(self._pool.device))
        ids, numbers = self._ids(source.blocks), out.view(self._pool.dtype)
        if target_tokens == source.block_tokens and not source.offset_tokens and targets == len(source.blocks):
            room = numbers.view(targets, len(layers), self._spec.planes, len(heads), *self._pool.shape[-2:])
            gather_blocks(self._pool, ids, _slice(layers), _slice(heads), out=room)
        else:
            gathered = gather_blocks(self._pool, ids, _slice(layers), _slice(heads))
            numbers.copy_(_reblocked(gathered, source.offset_tokens, target_tokens, targets).view(-1))

    @torch.inference_mode()
    def scatter_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: Tensor) -> None:
        """One pass on the device."""
        self._check(blocks, layers, heads, len(payload), payload_bytes(self._spec, len(blocks), layers, heads))
        if len(payload):
            shape = (len(blocks), len(layers), self._spec.planes, len(heads), *self._pool.shape[-2:])
            numbers = payload.view(self._pool.dtype).view(shape)
            scatter_blocks(self._pool, self._ids(blocks), numbers, _slice(layers), _slice(heads))

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        """Gather on the device, one copy to pinned memory, one into `out`."""
        self._check(blocks, layers, heads, len(out), payload_bytes(self._spec, len(blocks), layers, heads))
        run = TokenRun(tuple(blocks), self._spec.block_tokens)
        return self._read(run, layers, heads, out, None)

    def read_tokens_into(
        self, source: TokenRun, layers: range, heads: range, out: memoryview, *, target_tokens: int
    ) -> int:
        """The same, cut into other blocks on the device."""
        targets = self._targets(source, layers, heads, len(out), target_tokens)
        return self._read(source, layers, heads, out, (target_tokens, targets))

    @torch.inference_mode()
    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        """One copy to the device, then scatter there; returns when the blocks are written."""
        self._check(blocks, layers, heads, len(payload), payload_bytes(self._spec, len(blocks), layers, heads))
        if not len(payload):
            return 0
        shape = (len(blocks), len(layers), self._spec.planes, len(heads), *self._pool.shape[-2:])
        pinned, view = self._staging(len(payload))
        crc = kv_payload.copy(payload, view)
        with torch.cuda.stream(self._stream):
            numbers = pinned.view(self._pool.dtype).view(shape)
            staging = numbers.to(self._pool.device, non_blocking=True)
            scatter_blocks(self._pool, self._ids(blocks), staging, _slice(layers), _slice(heads))
        if self._stream is not None:
            self._stream.synchronize()
        return crc

    @torch.inference_mode()
    def _read(
        self, source: TokenRun, layers: range, heads: range, out: memoryview, targets: tuple[int, int] | None
    ) -> int:
        """`targets`: (tokens in a block, blocks) to cut the run into."""
        if not len(out):
            return 0
        with torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))
            gathered = gather_blocks(self._pool, self._ids(source.blocks), _slice(layers), _slice(heads))
            if targets is not None:
                gathered = _reblocked(gathered, source.offset_tokens, *targets)
            pinned, view = self._staging(len(out))
            pinned.copy_(gathered.view(-1).view(torch.uint8), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        return kv_payload.copy(view, out)

    def _staging(self, size: int) -> tuple[Tensor, memoryview]:
        """This thread's pinned memory, of `size` bytes, as a tensor and as a buffer."""
        kept: tuple[Tensor, memoryview] | None = getattr(self._kept, "staging", None)
        if kept is None or len(kept[1]) < size:
            tensor = torch.empty(size, dtype=torch.uint8, pin_memory=self._pool.is_cuda)
            raw = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
            kept = self._kept.staging = tensor, memoryview(raw).cast("B")
        return kept[0][:size], kept[1][:size]

    def _targets(self, source: TokenRun, layers: range, heads: range, size: int, target_tokens: int) -> int:
        """How many blocks of `target_tokens` the run is to fill. Raises ValueError if it does not fit."""
        if source.block_tokens != self._spec.block_tokens or not 0 <= source.offset_tokens < source.block_tokens:
            raise ValueError(f"{source} does not fit blocks of {self._spec.block_tokens} tokens")
        if target_tokens < 1:
            raise ValueError(f"blocks of {target_tokens} tokens")
        target = payload_bytes(self._spec, 1, layers, heads) // self._spec.block_tokens * target_tokens
        targets = size // max(1, target)
        self._check(source.blocks, layers, heads, size, targets * target)
        return targets

    def _check(self, blocks: Sequence[BlockId], layers: range, heads: range, size: int, expected: int) -> None:
        if not is_within(layers, self._pool.shape[1]) or not is_within(heads, self._pool.shape[3]):
            raise ValueError(f"layers {layers} or heads {heads} lie outside the pool")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._pool.shape[0]:
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)} lie outside the pool's {self._pool.shape[0]}")
        if size != expected:
            raise ValueError(f"a buffer of {size} bytes for a slice of {expected}")

    def _ids(self, blocks: Sequence[BlockId]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int32, device=self._pool.device)


def _reblocked(blocks: Tensor, offset: int, tokens: int, targets: int) -> Tensor:
    """`[n, layers, planes, heads, block_tokens, width]` cut anew: contiguous `[targets, …, tokens, width]`."""
    n, layers, planes, heads, block_tokens, width = blocks.shape
    flat = blocks.permute(1, 2, 3, 0, 4, 5).reshape(layers, planes, heads, n * block_tokens, width)
    flat = flat[..., offset : offset + targets * tokens, :]
    flat = pad(flat, (0, 0, 0, targets * tokens - flat.shape[-2]))
    return flat.view(layers, planes, heads, targets, tokens, width).permute(3, 0, 1, 2, 4, 5).contiguous()


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
