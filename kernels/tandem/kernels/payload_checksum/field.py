"""The field of the checksum and the tables of its factors, as both implementations use them.

Place i of the pieces is row `i // COLUMNS`, column `i % COLUMNS`, and its factor is that of its row times that of its
column: two short tables instead of one number a piece.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MODULUS = 2**32 - 5
BASE = 3_920_027_852
COLUMNS = 4096
"""Pieces in a row: a row's sum of 16-bit pieces times 32-bit factors stays below 2^60."""
LENGTH_PIECES = 2
"""The length stands before the first piece."""


def factors(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 `[rows]` and `[COLUMNS]`, kept for later calls."""
    by_row, by_column = _tables(max(256, 1 << (rows - 1).bit_length()), device)
    return by_row[:rows], by_column


@lru_cache(maxsize=64)
def _tables(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    step = pow(BASE, COLUMNS, MODULUS)
    return _powers(pow(BASE, LENGTH_PIECES, MODULUS), step, rows, device), _powers(1, BASE, COLUMNS, device)


def _powers(first: int, step: int, count: int, device: torch.device) -> Tensor:
    values = [first]
    while len(values) < count:
        values.append(values[-1] * step % MODULUS)
    return torch.tensor(values, dtype=torch.int64).to(device)


def times(a: Tensor, b: Tensor) -> Tensor:
    """a · b mod MODULUS of numbers below MODULUS, in 64 bits: by the halves of b."""
    high, low = b >> 16, b & 0xFFFF
    return (((a * high % MODULUS) << 16) + a * low) % MODULUS
