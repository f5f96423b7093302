"""Token ids as bytes: four each, the lowest first, on every machine."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

ID_BYTES = 4


def pack(ids: Sequence[int]) -> bytes:
    """OverflowError or TypeError for what is no id of 32 bits without a sign."""
    return _ordered(array("I", ids)).tobytes()


def unpack(data: bytes) -> array[int]:
    """ValueError for bytes that are no whole ids."""
    return _ordered(array("I", data))


def _ordered(ids: array[int]) -> array[int]:
    if ids.itemsize != ID_BYTES:  # pragma: no cover - no supported platform
        raise RuntimeError("array('I') is not 32 bits wide on this platform")
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
