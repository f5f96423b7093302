"""Settings of this process's memory: large temporary tensors, weights that every step reads, and pools of KV.

Owns calls to the C library. glibc hands freed megabytes back to the system and faults them in again, page by page,
at the next step: paged decode of 8 sequences of 512 tokens in fp32 took 2.1 ms that way and 0.3 ms without.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap

from tandem.core.memory import HUGE_PAGE_BYTES, MADV_COLLAPSE, madvise

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14."""


def keep_freed_memory(keep_bytes: int = 256 << 20) -> bool:
    """Let the allocator keep up to `keep_bytes` of freed memory, and serve tensors up to 32 MiB from it.

    For a process that computes on the CPU, once, at its start; process-wide, from any thread. Returns False where the C
    library is not glibc or refuses, which costs speed alone. Raises ValueError for a negative size.
    """
    if keep_bytes < 0:
        raise ValueError(f"keep_bytes must not be negative, got {keep_bytes}")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    most = min(keep_bytes, 2**31 - 1)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, most))


def map_zeroed(size: int) -> mmap.mmap:
    """Map `size` bytes of zeros that take memory only where they are touched, in pages of 2 MiB if the system has them.

    Page-aligned, of this process alone; unmapped with the last view of it. Raises OSError, or OverflowError for sizes
    beyond an address, where the system has not so much. Any thread may call it.
    """
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without such pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def back(address: int, size: int) -> bool:
    """Give memory to those of the `size` mapped bytes at `address` that have none yet; contents stay.

    Others may read and write there meanwhile, without this thread's holding Python's lock. Returns False where the
    system has no such call: then memory comes when bytes are touched. Raises OSError where there is no memory. Any
    thread may call it.
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        madvise(first, address + size, _MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return False
        raise
    return True


def collect_into_huge_pages(address: int, size: int) -> bool:
    """Move `size` bytes at `address` into pages of 2 MiB, at once; neighbours in the outermost pages move along.

    For data that is read from end to end at every step, such as weights: only large pages reach memory's speed.
    Contents and addresses stay. Returns False where the system has no such pages left, or no such call, and for less
    than a page, which costs speed alone. Any thread may call it.
    """
    first, last = (
        address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
        -(-(address + size) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES,
    )
    if _collapse(first, last):
        return True
    first, last = (
        -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES,
        (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
    )
    return first < last and _collapse(first, last)


def _collapse(first: int, last: int) -> bool:
    try:
        madvise(first, last, MADV_COLLAPSE)
    except OSError:
        return False
    return True
