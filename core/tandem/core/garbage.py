"""Short garbage collections in long-lived processes: a full one that walks all modules stops everything for 50 ms."""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Allocations before a collection of the youngest objects, and how many of those before one of the older ones."""


def keep_loaded() -> None:
    """Call when a process has loaded what it keeps: collections look only at what came after, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
