"""Limits of the machine: bytes read a second by a C loop over huge pages, and FLOPs a second in a large product."""

from __future__ import annotations

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tandem.core.cpu_level import CpuLevel, cpu_level
from tandem.kernels import native
from tandem.kernels.cpu_memory import collect_into_huge_pages
from tandem.kernels.prepacked_linear import PrepackedLinear

SOURCE = Path(__file__).with_name("read.c")
_BYTES = 512 << 20
_TIMES = 8
"""Number of reads at once: a thread that has just been woken may share a core for milliseconds."""
_PAGE = 2 << 20
_SIDE = 4096
"""Side of the square weight: 67 MB in bfloat16, multiplied by as many rows."""
_PRODUCTS = 2
"""Number of timed products, behind one that brings in memory for results."""


class ReadBandwidth:
    """Half a gigabyte in huge pages, read by as many threads as torch has. Raises OSError without a compiler."""

    def __init__(self) -> None:
        library = native.load(SOURCE)
        if library is None:
            raise OSError("the read bandwidth needs a C compiler, and no TANDEM_NATIVE=0")
        self._read = library.read_all
        self._read.argtypes, self._read.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t], ctypes.c_uint64
        self._memory = mmap.mmap(-1, _BYTES + _PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._address = -(-first // _PAGE) * _PAGE
        ctypes.memset(self._address, 1, _BYTES)
        collect_into_huge_pages(self._address, _BYTES)

    def measure(self) -> float:
        """Bytes a second, once."""
        threads = torch.get_num_threads()
        share = _BYTES // threads // 512 * 512
        with ThreadPoolExecutor(threads) as pool:
            places = [self._address + share * place for place in range(threads)]
            list(pool.map(self._read, places, [512] * threads, [1] * threads))  # the threads run
            started = time.perf_counter()
            list(pool.map(self._read, places, [share] * threads, [_TIMES] * threads))
            return _TIMES * share * threads / (time.perf_counter() - started)


def quick_dtype() -> torch.dtype:
    """The type of large products in which this CPU is quickest: float32 without instructions for bfloat16."""
    return torch.bfloat16 if cpu_level() >= CpuLevel.AVX512BF16 else torch.float32


class GemmPeak:
    """A large product with a packed weight, in `quick_dtype`."""

    def __init__(self) -> None:
        self._multiply = PrepackedLinear(torch.randn(_SIDE, _SIDE).to(quick_dtype()))
        self._rows = torch.randn(_SIDE, _SIDE).to(quick_dtype())

    @torch.inference_mode()
    def measure(self) -> float:
        """FLOPs a second, once; a multiplication and an addition are two."""
        self._multiply(self._rows)
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            self._multiply(self._rows)
        return 2 * _SIDE**3 * _PRODUCTS / (time.perf_counter() - started)
