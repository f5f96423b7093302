"""Memory of long-lived processes: short garbage collections, as a full one that walks all modules stops everything for
50 ms, and large buffers that go back to the system."""

from __future__ import annotations

import ctypes
import gc
import re
from contextlib import suppress
from pathlib import Path

_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Allocations before a collection of the youngest objects, and how many of those before one of the older ones."""
_LOADING = 50_000
"""Allocations before a collection while a process loads."""

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES, _ARENAS = 256 << 10, 2
_MADV_COLLAPSE, _HUGE_BYTES = 25, 2 << 20
_ANONYMOUS = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw-p \S+ \S+ 0 .*\n"
    r"(?:[A-Z]\w*: .*\n)*?Private_Dirty: +(?P<own_kb>\d+) kB", re.M
)  # fmt: skip


def return_large_buffers() -> None:
    """Have glibc return every freed buffer of 256 KiB or more to the system, and threads share two arenas. Call at the
    start of a process whose threads read large bodies: by itself glibc keeps ever larger ones. Elsewhere nothing
    changes."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def return_free_memory() -> None:
    """Have glibc return what is free between buffers in use. Call after work that took hundreds of megabytes in small
    pieces, on a thread of its own: it takes about 0.1 ms for each. Elsewhere nothing changes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def load_without_pauses() -> None:
    """Call at the start of a process that imports and loads much: hardly any of it is garbage, and looking for some
    takes a tenth of a second of importing torch. Until `keep_loaded`."""
    gc.set_threshold(_LOADING, _MIDDLE, _OLD)


def keep_loaded() -> None:
    """Call when a process has loaded what it keeps: collections look only at what came after, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def use_huge_pages() -> None:
    """Have the kernel put what this process has in memory now on huge pages, where that is half full at least and its
    own, not shared with a process that it was forked from (Linux 6.1 on; elsewhere nothing changes). Call once, after
    `keep_loaded`: a process of many short tasks runs little code often, and looks up the pages of its objects each
    time. It takes some milliseconds for each 2 MiB."""
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        for place in _ANONYMOUS.finditer(Path("/proc/self/smaps").read_text()):
            start, end = int(place["start"], 16), int(place["end"], 16)
            first, last = -(-start // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
            if first < last and 2 * 1024 * int(place["own_kb"]) >= end - start:
                madvise(first, last - first, _MADV_COLLAPSE)
