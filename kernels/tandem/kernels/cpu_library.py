"""The C code of one operation for CPUs with AVX2 or AVX-512: loading it, and the one way in which it is called."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tandem.kernels import native
from tandem.kernels.backend import uses_native

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
"""Of the numbers that most of the code has."""
LANES = 16
"""Numbers of a vector: most of the code has rows of whole vectors."""


class CpuLibrary:
    """The `cpu.c` of one operation: `int tandem_<operation>(const int64_t *, float)` and
    `int tandem_choose_path(const char *)`.

    Loaded, and compiled where that was not done yet, when it is first asked for; `warmup` does so at start. Without a
    compiler, or on a CPU that it has no code for, it is not available, and its callers take torch. Thread-safe.
    """

    def __init__(self, operation: str) -> None:
        self.source, self._name = Path(__file__).parent / operation / "cpu.c", f"tandem_{operation}"
        self._loaded: ctypes.CDLL | None = None
        self._function: Any = None
        self._is_tried = False
        self.path = 0
        """The path that `tandem_choose_path` chose, in the library's own numbers; 0 = none, or not asked for yet."""

    def serves(self, device: torch.device = CPU, backend: str | None = None) -> bool:
        """True if tensors on `device` may go to this code, by `uses_native`, and there is code for this machine.

        Raises ValueError for an unknown name of a backend.
        """
        return uses_native(device, backend) and self.is_available()

    def is_available(self) -> bool:
        """True if there is code for this machine, and it is not switched off."""
        if not native.is_enabled():
            return False
        if not self._is_tried:
            self._load()
        return self.path != 0

    def call(self, numbers: Iterable[int], number: float = 0.0) -> int:
        """Call the function with addresses and sizes, each of 64 bits; other threads of Python run meanwhile."""
        return self.call_with(array("q", numbers), number)

    def call_with(self, given: array[int], number: float = 0.0) -> int:
        """The same, with the numbers in an array of type "q"."""
        answer: int = self._function(given.buffer_info()[0], number)
        return answer

    def address(self, name: str) -> int:
        """Address of a function that other libraries' code calls; only where this one is available."""
        return ctypes.cast(getattr(self._loaded, name), ctypes.c_void_p).value or 0

    def choose_path(self, name: str) -> bool:
        """For tests: use the named instructions (`avx512`, `avx2`; "" = the best) from now on; False without them.

        By name there may be a path where "" has none: torch is faster than it on such a CPU.
        """
        self.is_available()
        if self._loaded is None or not native.is_enabled():
            return False
        self.path = int(self._loaded.tandem_choose_path(name.encode()))
        return self.path != 0

    def _load(self) -> None:
        loaded = native.load(self.source)
        if loaded is not None:
            loaded.tandem_choose_path.argtypes = [ctypes.c_char_p]
            self._function = getattr(loaded, self._name)
            self._function.argtypes, self._function.restype = [ctypes.c_void_p, ctypes.c_float], ctypes.c_int
            self._loaded, self.path = loaded, int(loaded.tandem_choose_path(b""))
        self._is_tried = True


@cache
def library_of(operation: str) -> CpuLibrary:
    """The library of a folder's operation, the same at every call."""
    return CpuLibrary(operation)
