"""The few calls of the CUDA driver that share memory between processes, by ctypes; and tensors over plain addresses.

torch's own sharing of storages is not used: it hands out its caching allocator's segments, keeps counts in files of its
own and takes pickled arguments. Nothing here has run on a GPU yet, but for the tensors over addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from tandem.kvtransfer.transports.base import LinkClosedError, UnavailableTransportError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_CPU, _CUDA, _UNSIGNED = 1, 2, 1


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaDriver:
    """`libcuda` for one device; every call makes its primary context, which torch uses too, the current one."""

    def __init__(self, ordinal: int) -> None:
        """Raises UnavailableTransportError."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnavailableTransportError(f"no CUDA driver: {error}") from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self._call("cuInit", ctypes.c_uint(0))
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # for good: torch keeps it as well
        except LinkClosedError as error:
            raise UnavailableTransportError(str(error)) from error
        self._context = context

    def allocate(self, size: int) -> int:
        """Device memory outside torch's allocator; its address. Raises LinkClosedError."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return int(address.value)

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        """The handle by which another process opens an allocation. Raises LinkClosedError."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation in this one. Raises LinkClosedError."""
        given, address = _Handle.from_buffer_copy(handle), ctypes.c_uint64()
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return int(address.value)

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise LinkClosedError(f"{name} failed: {(text.value or str(code).encode()).decode()}")


@lru_cache(maxsize=16)
def driver(ordinal: int) -> CudaDriver:
    """One for each device of this process. Raises UnavailableTransportError."""
    return CudaDriver(ordinal)


def used_device() -> torch.device:
    """The one GPU that this process uses; threads do not inherit the choice. Raises UnavailableTransportError."""
    if not torch.cuda.is_available():
        raise UnavailableTransportError("no CUDA device")
    native: Any = torch._C
    used = [index for index in range(torch.cuda.device_count()) if native._cuda_hasPrimaryContext(index)]
    if len(used) != 1:
        raise UnavailableTransportError(f"needs a process that uses one GPU; this one uses {used or 'none'}")
    return torch.device("cuda", used[0])


class _Tensor(ctypes.Structure):
    """`DLTensor` of DLPack 0.8, up to the managed one that it is part of."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class BorrowedTensor:
    """A uint8 tensor over `size` bytes at an address, which it does not own: keep this object longer than any view."""

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self._shape = (ctypes.c_int64 * 1)(size)
        kind, index = (_CUDA, device.index or 0) if device.type == "cuda" else (_CPU, 0)
        self._described = _Tensor(
            data=address, device_type=kind, device_id=index, ndim=1, code=_UNSIGNED, bits=8, lanes=1,
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)), strides=None, byte_offset=0,
            manager=None, deleter=None,
        )  # fmt: skip
        capsule: Any = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        from_capsule: Any = dlpack.from_dlpack
        self.tensor: Tensor = from_capsule(capsule(ctypes.addressof(self._described), b"dltensor", None))
