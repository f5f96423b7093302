"""Memory that one process fills and another reads: the sender's staging, by a handle that a socket can carry.

`cuda_memory.CudaMemory` is the GPU's. `HostMemory` here is shared memory of the host, with CPU tensors over it: it has
no use but to run, on any machine, the very code that moves payloads between GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.kvtransfer.transports.base import WINDOW_BYTES, LinkClosedError
from tandem.kvtransfer.transports.sealed_memfd import check_sealed, make_sealed


class Staging(Protocol):
    """The sender's memory; `handle` and `descriptors` let another process map it."""

    @property
    def tensor(self) -> Tensor:
        """uint8 `[size]`."""
        ...

    @property
    def handle(self) -> bytes: ...

    @property
    def descriptors(self) -> tuple[int, ...]: ...

    def free(self) -> None:
        """Free memory that no process reads any more."""
        ...


class Mapping(Protocol):
    """The same memory at the receiver."""

    @property
    def tensor(self) -> Tensor: ...

    def close(self) -> None:
        """Close a mapping that no queued work reads any more."""
        ...


class DeviceMemory(Protocol):
    """One device and a stream of its own, for one end of one link."""

    @property
    def device(self) -> torch.device: ...

    @property
    def least_window_bytes(self) -> int:
        """Smallest useful window: with a smaller one the time would go into launches."""
        ...

    def allocate(self, size: int) -> Staging:
        """Allocate staging memory. Raises LinkClosedError."""
        ...

    def open(self, handle: bytes, descriptors: Sequence[int], size: int) -> Mapping:
        """Map what a peer allocated; the descriptors stay the caller's. Raises LinkClosedError."""
        ...

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Makes the stream the current one of this thread."""
        ...

    def synchronize(self) -> None:
        """Wait until all that was queued on the stream is done."""
        ...

    def host_buffer(self, size: int) -> Tensor:
        """uint8 `[size]` in host memory from and to which the device copies."""
        ...


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, which it must outlive."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_uint8 * size).from_address(tensor.data_ptr())).cast("B")


class HostMemory:
    """Shared memory of this host; nothing is ever queued."""

    device = torch.device("cpu")
    least_window_bytes = WINDOW_BYTES

    def allocate(self, size: int) -> Staging:
        try:
            return _HostStaging(size)
        except OSError as error:
            raise LinkClosedError(f"no staging memory: {error}") from error

    def open(self, handle: bytes, descriptors: Sequence[int], size: int) -> Mapping:
        if handle or len(descriptors) != 1:
            raise LinkClosedError("not a handle of host memory")
        try:
            check_sealed(descriptors[0], size)
            return _HostMapping(descriptors[0], size)
        except OSError as error:
            raise LinkClosedError(f"the staging memory cannot be mapped: {error}") from error

    def stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        return

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)


class _HostMapping:
    """Unmapped when the last view of it is gone."""

    handle = b""

    def __init__(self, descriptor: int, size: int) -> None:
        self._tensor: Tensor | None = torch.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED), dtype=torch.uint8)

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            raise LinkClosedError("the staging memory was given back")
        return self._tensor

    def close(self) -> None:
        self._tensor = None


class _HostStaging(_HostMapping):
    def __init__(self, size: int) -> None:
        self._descriptor = make_sealed("tandem-kv-staging", size)
        try:
            super().__init__(self._descriptor, size)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self._descriptor,)

    def free(self) -> None:
        self.close()
        os.close(self._descriptor)
