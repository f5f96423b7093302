"""Memory of this process: freed memory goes back, kept memory is put on huge pages, collections of garbage are rare."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
from contextlib import suppress
from pathlib import Path

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
"""Linux 6.1."""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES, _ARENAS = 256 << 10, 2
_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Allocations before a collection of the youngest objects, and how many of those before one of the older ones."""
_LOADING = 50_000
"""Allocations before a collection while a process loads."""
_ANONYMOUS = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw-p \S+ \S+ 0 .*\n"
    r"(?:[A-Z]\w*: .*\n)*?Private_Dirty: +(?P<own_kb>\d+) kB", re.M
)  # fmt: skip


def return_large_buffers() -> None:
    """Have glibc return every freed buffer of 256 KiB or more to the system, and threads share two arenas. Call at the
    start of a process with threads that read large bodies: by itself glibc keeps ever larger ones. Elsewhere nothing
    changes."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def return_free_memory() -> None:
    """Have glibc return free memory between buffers in use. Call after work that took hundreds of megabytes in small
    pieces, on a thread of its own: it takes about 0.1 ms for each. Elsewhere nothing changes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def allocated_bytes() -> int:
    """Bytes that all threads have from glibc 2.33 or later; 0 elsewhere."""
    with suppress(OSError, AttributeError):
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)
    return 0


def madvise(first: int, last: int, advice: int) -> None:
    """Advise the kernel about the pages from address `first` to `last`. Raises OSError; ENOSYS without such a call."""
    try:
        call = ctypes.CDLL(None, use_errno=True).madvise
    except AttributeError as error:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    if call(first, last - first, advice):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def use_huge_pages() -> None:
    """Have the kernel put this process's present memory on huge pages, where that is half full at least and its own,
    not shared with a process that it was forked from (Linux 6.1 on; elsewhere nothing changes). Call once, after
    `freeze_gc`: a process of many short tasks runs little code often, and looks up the pages of its objects each
    time. It takes some milliseconds for each 2 MiB."""
    with suppress(OSError):
        for place in _ANONYMOUS.finditer(Path("/proc/self/smaps").read_text()):
            start, end = int(place["start"], 16), int(place["end"], 16)
            first, last = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if first < last and 2 * 1024 * int(place["own_kb"]) >= end - start:
                with suppress(OSError):  # a page may change meanwhile; the others are unaffected
                    madvise(first, last, MADV_COLLAPSE)


def load_without_pauses() -> None:
    """Call at the start of a process that imports and loads much, until `freeze_gc`: hardly any of it is garbage, and
    collections take a tenth of a second of importing torch."""
    gc.set_threshold(_LOADING, _MIDDLE, _OLD)


def freeze_gc() -> None:
    """Call when a process has loaded what it keeps: collections then look only at later objects, and are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
