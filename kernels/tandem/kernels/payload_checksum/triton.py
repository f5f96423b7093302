"""The checksum for the GPU: a program sums one row and adds it to the total; integers add up in any order."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.kernels.payload_checksum.reference import COLUMNS, MODULUS, factors


@triton.jit
def _weighted_sum_kernel(
    bytes_ptr,
    pieces_ptr,
    num_bytes,
    by_row_ptr,
    by_column_ptr,
    total_ptr,
    COLUMNS: tl.constexpr,
    MODULUS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    places = row * COLUMNS + columns
    pieces = tl.load(pieces_ptr + places, mask=places < num_bytes // 2, other=0).to(tl.int64) & 0xFFFF
    last = tl.load(bytes_ptr + 2 * places, mask=2 * places + 1 == num_bytes, other=0).to(tl.int64)  # of an odd number
    row_sum = tl.sum((pieces + last) * tl.load(by_column_ptr + columns), axis=0) % MODULUS
    factor = tl.load(by_row_ptr + row)
    weighted = (((row_sum * (factor >> 16)) % MODULUS) << 16) + row_sum * (factor & 0xFFFF)
    tl.atomic_add(total_ptr, weighted % MODULUS, sem="relaxed")


def weighted_sum_triton(data: Tensor) -> Tensor:
    """See `weighted_sum_reference`; not reduced by MODULUS."""
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    rows = -(-len(data) // (2 * COLUMNS))
    if rows == 0:
        return total
    pieces = data[: len(data) // 2 * 2].view(torch.int16)
    by_row, by_column = factors(rows, data.device)
    _weighted_sum_kernel[(rows,)](
        data, pieces, len(data), by_row, by_column, total, COLUMNS=COLUMNS, MODULUS=MODULUS, num_warps=4
    )
    return total
