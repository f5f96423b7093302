"""Pools over a device of torch's, which payloads need not leave; they wait and count as the rig's do."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.core.ids import BlockId
from tandem.core.kv_layout import KVGroupSpec
from tandem.kvtransfer.kv_pool_access import TokenRun
from tandem.kvtransfer.transports.device_memory import bytes_of
from tandem.worker.device_pool_io import DevicePool


class DeviceBytes:
    """A device's memory, used like a bytearray."""

    def __init__(self, content: bytes | bytearray, device: str) -> None:
        self.tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)

    def __len__(self) -> int:
        return len(self.tensor)

    def __bytes__(self) -> bytes:
        return self[:]

    def __getitem__(self, part: slice) -> bytes:
        copied = self.tensor[part].contiguous().cpu()
        return bytes(bytes_of(copied))

    def __setitem__(self, part: slice, content: bytes) -> None:
        self.tensor[part] = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.tensor.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceBytes | bytes | bytearray) and bytes(self) == bytes(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(bytes(self))


def tensor_over(spec: KVGroupSpec, tp: int, data: DeviceBytes) -> Tensor:
    """`[num_blocks, layers, planes, heads, block_tokens, width]` over the same memory."""
    shape = (-1, len(spec.layers), spec.planes, spec.heads_local(tp), spec.block_tokens, spec.width)
    return data.tensor.view(getattr(torch, spec.dtype)).view(shape)


class GatedDevicePool(DevicePool):
    """Reads or writes wait while a gate is shut; counts both."""

    def __init__(self, spec: KVGroupSpec, tp: int, data: DeviceBytes, patience_s: float) -> None:
        super().__init__(spec, tp, tensor_over(spec, tp, data))
        self._patience_s = patience_s
        self.read_gate, self.write_gate = threading.Event(), threading.Event()
        self.read_gate.set()
        self.write_gate.set()
        self.bytes_read = self.gathered = self.scattered = 0
        self.writing, self.reading = threading.Event(), threading.Event()

    def read_into(self, blocks: Sequence[BlockId], layers: range, heads: range, out: memoryview) -> int:
        self._wait(self.reading, self.read_gate)
        crc = super().read_into(blocks, layers, heads, out)
        self.bytes_read += len(out)
        return crc

    def gather_into(self, source: TokenRun, layers: range, heads: range, out: Tensor, *, target_tokens: int) -> None:
        self._wait(self.reading, self.read_gate)
        super().gather_into(source, layers, heads, out, target_tokens=target_tokens)
        self.bytes_read += len(out)
        self.gathered += 1

    def write_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: memoryview) -> int:
        self._wait(self.writing, self.write_gate)
        return super().write_from(blocks, layers, heads, payload)

    def scatter_from(self, blocks: Sequence[BlockId], layers: range, heads: range, payload: Tensor) -> None:
        self._wait(self.writing, self.write_gate)
        super().scatter_from(blocks, layers, heads, payload)
        self.scattered += 1

    def _wait(self, begun: threading.Event, gate: threading.Event) -> None:
        begun.set()
        assert gate.wait(self._patience_s)


class SlowDevicePool(DevicePool):
    """Reports every write; the copy of number `halts_at` (reads and writes counted together) waits for the gate."""

    def __init__(self, spec: KVGroupSpec, tp: int, data: DeviceBytes, say: Callable[[str], None]) -> None:
        super().__init__(spec, tp, tensor_over(spec, tp, data))
        self.gate = threading.Event()
        self.halts_at = -1
        self._say, self._copies = say, itertools.count()

    def gather_into(self, *args: Any, **options: Any) -> None:
        self._halt()
        super().gather_into(*args, **options)

    def scatter_from(self, *args: Any) -> None:
        self._say("writing")
        self._halt()
        super().scatter_from(*args)

    def _halt(self) -> None:
        if next(self._copies) == self.halts_at:
            self._say("halted")
            self.gate.wait()
