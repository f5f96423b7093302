"""A `bytes` object that is filled after it was made: gRPC takes nothing else, and a copy of every payload is spared."""

from __future__ import annotations

import ctypes

_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.c_ssize_t], ctypes.py_object
_start = ctypes.pythonapi.PyBytes_AsString
_start.argtypes, _start.restype = [ctypes.py_object], ctypes.c_void_p


class Fillable:
    """`room` may be written until `take` hands the object out; nothing else refers to it before.

    The C API allows this for an object that it made without content. Memory comes fresh from the allocator, which
    should keep what is freed (`kernels.cpu_memory`), or every page is faulted in anew.
    """

    def __init__(self, size: int) -> None:
        """`size` of at least 2: shorter objects are shared by the interpreter."""
        if size < 2:
            raise ValueError(f"{size} bytes are not filled in place")
        self._data: bytes = _new(None, size)
        raw = (ctypes.c_char * size).from_address(_start(self._data))
        raw.owner = self._data  # type: ignore[attr-defined]  # a view that outlives us keeps the object
        self.room = memoryview(raw).cast("B")

    def take(self) -> bytes:
        """The object, which must not be written any more."""
        self.room.release()
        return self._data
