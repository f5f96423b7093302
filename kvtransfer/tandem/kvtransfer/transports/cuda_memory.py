"""A GPU's memory behind `cuda_ipc`. Nothing here has run on a GPU yet: the transport is proven on `cpu_ipc`.

handle = this process's token (16 bytes), the ring's address in it (8), the driver's handle (64). The driver refuses to
open a handle in the process that made it: the token identifies that case, and the address itself is used.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.cuda_driver import HANDLE_BYTES, BorrowedTensor, CudaDriver, driver, used_device
from tandem.kvtransfer.transports.device_memory import Mapping, Staging

CUDA_WINDOW_BYTES = 32 << 20
"""Of device memory a link: frames of 8 MiB, large enough to hide what launching their kernels takes."""
_HANDLE = struct.Struct(f"<16sQ{HANDLE_BYTES}s")
_THIS_PROCESS = secrets.token_bytes(16)


class CudaMemory:
    """The GPU that this process uses, and a stream of its own for one end of one link."""

    least_window_bytes = CUDA_WINDOW_BYTES

    def __init__(self) -> None:
        """Raises UnavailableTransportError where there is no GPU, or several are in use."""
        self.device = used_device()
        self._driver = driver(self.device.index)
        cuda: Any = torch.cuda  # its stubs leave much untyped
        self._stream = cuda.Stream(self.device)

    def allocate(self, size: int) -> Staging:
        return _CudaStaging(self._driver, size, self.device)

    def open(self, handle: bytes, descriptors: Sequence[int], size: int) -> Mapping:
        if descriptors or len(handle) != _HANDLE.size:
            raise LinkClosedError("not a handle of CUDA memory")
        process, address, exported = _HANDLE.unpack(handle)
        is_own = process == _THIS_PROCESS
        return _CudaMapping(
            self._driver, address if is_own else self._driver.open(exported), size, self.device, is_opened=not is_own
        )

    @contextlib.contextmanager
    def stream(self) -> Any:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        self._stream.synchronize()

    def host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class _CudaStaging:
    """An allocation of its own, so that its handle gives away nothing else."""

    descriptors: tuple[int, ...] = ()

    def __init__(self, cuda: CudaDriver, size: int, device: torch.device) -> None:
        self._driver, self._address = cuda, cuda.allocate(size)
        try:
            self.handle = _HANDLE.pack(_THIS_PROCESS, self._address, cuda.export(self._address))
            self._borrowed = BorrowedTensor(self._address, size, device)
        except BaseException:
            cuda.free(self._address)
            raise

    @property
    def tensor(self) -> Tensor:
        return self._borrowed.tensor

    def free(self) -> None:
        self._driver.free(self._address)


class _CudaMapping:
    """The tensor is labelled with the receiver's device, wherever the memory lies: copies find out by the address."""

    def __init__(self, cuda: CudaDriver, address: int, size: int, device: torch.device, *, is_opened: bool) -> None:
        self._driver, self._address, self._is_opened = cuda, address, is_opened
        self._borrowed = BorrowedTensor(address, size, device)

    @property
    def tensor(self) -> Tensor:
        return self._borrowed.tensor

    def close(self) -> None:
        if self._is_opened:
            self._driver.close(self._address)
