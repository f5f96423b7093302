"""How the Triton kernels cut their work: every tile, warp and stage count, by shape alone. Pure; imports no Triton.

There is no search at run time: it costs minutes at a start, and a CUDA graph would keep whatever it found first. The
numbers follow from shared memory, registers and public measurements; none has been tuned on a device by this project.
"""

from __future__ import annotations

GATE_TILE, GATE_WARPS = 1024, 4
"""Numbers of a row that one program of an elementwise kernel takes, and its warps."""
MOST_ROW_NUMBERS = 32768
"""Padded numbers of a row that one program keeps in registers: 64 a thread in 16 warps."""


def row_warps(padded: int) -> int:
    """Warps of a program that holds a row of `padded` numbers (a power of two): about 8 to 16 numbers a thread."""
    return max(1, min(16, padded // 256))
