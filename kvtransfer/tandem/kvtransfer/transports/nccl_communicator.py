"""The communicator of `nccl`: payloads between two GPUs over NCCL, through pinned host memory at both ends.

Nothing here has run on a GPU yet: the transport around it is proven on gloo. A payload crosses PCIe on its way into the
staging memory of one device and out of the other's, because pools gather and scatter through host memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tandem.kvtransfer.transports import gloo_communicator
from tandem.kvtransfer.transports.base import LinkClosedError, UnavailableTransportError
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.cuda_driver import used_device
from tandem.kvtransfer.transports.gloo_communicator import ControlStore, Transfer, first_line

MAX_CTAS = 2
"""NCCL's channels, and with them its memory and the processors it takes from the model, for each link."""
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # a link that fails is aborted; the default would end the process
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5",  # seconds for NCCL's own connecting; the default is half an hour
}
_environment_lock = threading.Lock()


def check_available() -> None:
    """Raises UnavailableTransportError where torch has no NCCL or this process does not use exactly one GPU."""
    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        raise UnavailableTransportError("nccl needs a CUDA device and a torch built with NCCL")
    used_device()


class NcclCommunicator:
    """Over NCCL, in order; one stream of its own. Ends as its watchdog, `abort` or the peer's end has it."""

    def __init__(self, control: ControlSocket, rank: int, size: int) -> None:
        """Meet the peer; both ends call this. Raises LinkClosedError or OSError, also for two ranks on one GPU."""
        self._peer, self._device = 1 - rank, used_device()
        self._is_aborted = False
        self._store = ControlStore(control)
        self._refuse_one_gpu(rank)
        cuda: Any = torch.cuda  # its stubs leave much untyped
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.staging = memoryview((ctypes.c_char * size).from_address(self._host.data_ptr())).cast("B")
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._stream = cuda.Stream(self._device)
        nccl: Any = distributed
        try:
            with _environment(), cuda.device(self._device):
                options = nccl.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=gloo_communicator.PAYLOAD_TIMEOUT_S)
                options.config.blocking, options.config.max_ctas = 0, MAX_CTAS
                self._group: Any = nccl.ProcessGroupNCCL(self._store, rank, 2, options)
                first = self.send(0, 1) if rank == gloo_communicator.SENDER_RANK else self.receive(0, 1)  # connects
            first.wait()
            self._store.finish()
        except RuntimeError as error:
            raise LinkClosedError(f"no communicator: {first_line(error)}") from error

    def send(self, offset: int, size: int) -> Transfer:
        host, device = self._host[offset : offset + size], self._memory[offset : offset + size]
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
            return self._under_way(lambda: self._group.send([device], self._peer, 0))

    def receive(self, offset: int, size: int) -> Transfer:
        host, device = self._host[offset : offset + size], self._memory[offset : offset + size]
        with torch.cuda.stream(self._stream):
            return self._under_way(lambda: self._group.recv([device], self._peer, 0), lambda: host.copy_(device, True))

    def abort(self) -> None:
        self._is_aborted = True
        if self._group is not None:
            self._group.abort()
            self._stream.synchronize()  # what had begun is over now: the kernels of an aborted group return

    def release(self) -> None:
        self._group = None

    def _under_way(self, begin: Any, then: Any = None) -> Transfer:
        """Queue an operation on the stream, and what follows it, and mark the end. Raises LinkClosedError."""
        if self._is_aborted:
            raise LinkClosedError("the communicator was aborted")
        try:
            begin().wait()  # of the stream, not of this thread
            if then is not None:
                then()
            end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            end.record(self._stream)
        except RuntimeError as error:
            raise LinkClosedError(first_line(error)) from error
        return _NcclTransfer(self, end)

    def _refuse_one_gpu(self, rank: int) -> None:
        mine = str(torch.cuda.get_device_properties(self._device).uuid).encode()
        self._store.set(f"gpu/{rank}", mine)
        if self._store.get(f"gpu/{self._peer}") == mine:
            raise LinkClosedError("both ranks use one GPU, which NCCL cannot do: use cuda_ipc, shm or tcp between them")


class _NcclTransfer:
    """Ends with the stream's work. A receive that was cut short leaves bytes that fail their checksum."""

    def __init__(self, owner: NcclCommunicator, end: Any) -> None:
        self._owner, self._end = owner, end
        self._late_after_s = time.monotonic() + gloo_communicator.PAYLOAD_TIMEOUT_S

    def wait(self) -> None:
        try:
            self._end.synchronize()
        except RuntimeError as error:
            raise LinkClosedError(first_line(error)) from error
        if self._owner._is_aborted or time.monotonic() >= self._late_after_s:
            raise LinkClosedError("the communicator was aborted")


@contextmanager
def _environment() -> Iterator[None]:
    """Set torch's environment-only options while a group is made; other groups keep their own."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
