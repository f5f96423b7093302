"""Memory of long-lived processes: short garbage collections, as a full one that walks all modules stops everything for
50 ms, and large buffers that go back to the system."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Allocations before a collection of the youngest objects, and how many of those before one of the older ones."""
_LOADING = 50_000
"""Allocations before a collection while a process loads."""

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES, _ARENAS = 256 << 10, 2


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
