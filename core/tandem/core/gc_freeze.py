"""Shortens garbage collections of long-lived processes: a full one that walks all modules stops everything for 50
ms."""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 10_000, 20, 20
"""Allocations before a collection of the youngest objects, and how many of those before one of the older ones."""
_LOADING = 50_000
"""Allocations before a collection while a process loads."""


def load_without_pauses() -> None:
    """Call at the start of a process that imports and loads much, until `freeze_gc`: hardly any of it is garbage, and
    collections take a tenth of a second of importing torch."""
    gc.set_threshold(_LOADING, _MIDDLE, _OLD)


def freeze_gc() -> None:
    """Call when a process has loaded what it keeps: collections then look only at later objects, and are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
