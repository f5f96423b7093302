"""The checksum in torch: the specification and the CPU path, with the tables of its factors.

Place i of the pieces is row `i // COLUMNS`, column `i % COLUMNS`, and its factor is that of its row times that of its
column: two short tables instead of one number a piece.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

MODULUS = 2**32 - 5
BASE = 3_920_027_852
COLUMNS = 4096
"""Pieces in a row: a row's sum of 16-bit pieces times 32-bit factors stays below 2^60."""
LENGTH_PIECES = 2
"""The length stands before the first piece."""


def weighted_sum_reference(data: Tensor) -> Tensor:
    """Σ piece[i] · BASE^(i + 2), mod MODULUS, of uint8 `[n]`; a scalar on the device of `data`."""
    rows = max(1, -(-len(data) // (2 * COLUMNS)))
    by_row, by_column = factors(rows, data.device)
    halves = pad(data, (0, rows * 2 * COLUMNS - len(data))).view(rows, COLUMNS, 2).long()
    sums = ((halves[..., 0] + (halves[..., 1] << 8)) * by_column).sum(1) % MODULUS
    return times(sums, by_row).sum() % MODULUS


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
