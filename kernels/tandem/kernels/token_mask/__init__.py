"""Forbidding tokens by packed bits, as grammars give them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.cpu_library import library_of
from tandem.kernels.token_mask.reference import forbid_reference

__all__ = ["LIBRARY", "forbid"]

LIBRARY = library_of("token_mask")


def forbid(scores: Tensor, rows: Sequence[int], bits: Tensor, *, backend: str | None = None) -> None:
    """Set the scores of tokens without a bit to -inf, in place.

    scores: fp32 `[n, vocab]`, contiguous. rows: distinct, one for each row of `bits`. bits: uint8
    `[len(rows), at least vocab / 8]`, on the device of the scores; the lowest bit of a row's first byte is token 0.
    Raises ValueError (shapes) or TypeError (dtypes). The same result on every device.
    """
    count, width = scores.shape
    if bits.shape[0] != len(rows) or 8 * bits.shape[1] < width or not all(0 <= row < count for row in rows):
        raise ValueError(
            f"scores are {tuple(scores.shape)}, and {tuple(bits.shape)} bytes of bits for {len(rows)} rows"
        )
    if scores.dtype is not torch.float32 or bits.dtype is not torch.uint8:
        raise TypeError(f"expected float32 and uint8, got {scores.dtype} and {bits.dtype}")
    if uses_triton(scores.device, backend) and scores.is_contiguous():
        from tandem.kernels.token_mask.triton import forbid_triton

        forbid_triton(scores, rows, bits.contiguous())
    elif scores.is_contiguous() and bits.is_contiguous() and LIBRARY.serves(scores.device, backend):
        places = torch.tensor(rows, dtype=torch.int64)
        LIBRARY.call((
            scores.data_ptr(), places.data_ptr(), bits.data_ptr(), len(rows), width, bits.shape[1],
            torch.get_num_threads(),
        ))  # fmt: skip
    else:
        forbid_reference(scores, rows, bits)
