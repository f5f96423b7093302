"""The checksum in torch: the specification, and the CPU path."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.payload_checksum.field import COLUMNS, MODULUS, factors, times


def weighted_sum_reference(data: Tensor) -> Tensor:
    """Σ piece[i] · BASE^(i + 2), mod MODULUS, of uint8 `[n]`; a scalar on the device of `data`."""
    rows = max(1, -(-len(data) // (2 * COLUMNS)))
    by_row, by_column = factors(rows, data.device)
    halves = pad(data, (0, rows * 2 * COLUMNS - len(data))).view(rows, COLUMNS, 2).long()
    sums = ((halves[..., 0] + (halves[..., 1] << 8)) * by_column).sum(1) % MODULUS
    return times(sums, by_row).sum() % MODULUS
