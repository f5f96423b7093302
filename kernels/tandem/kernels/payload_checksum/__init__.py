"""A 32-bit checksum of bytes that lie in a device's memory, taken there: for payloads that the CPU never sees.

Bytes are 16-bit little-endian pieces (an odd last byte is followed by a zero). With `n` the number of bytes,

    pieces s = (n mod 2^16, n div 2^16, first piece, second piece, …)        sum = Σ s[i] · BASE^i  mod MODULUS

MODULUS = 2^32 − 5 is prime and BASE a primitive root of it, so that no two places up to 8 GiB share a factor. Always
found: any change inside one aligned 16-bit piece (each flipped bit, each wrong byte); two pieces swapped; in payloads
up to 16 MiB any two flipped bits (BASE was chosen for that). Other damage, truncation among it, passes with a chance of
2^-32. It is not a CRC: a burst across two or more pieces has that chance too. It guards against accidents, not
against an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.backend import uses_triton
from tandem.kernels.payload_checksum.reference import BASE, MODULUS, weighted_sum_reference

__all__ = ["BASE", "MODULUS", "payload_checksum"]

_MAX_BYTES = 1 << 32


def payload_checksum(data: Tensor, *, backend: str | None = None) -> int:
    """The checksum of `data`: uint8 `[n]`, contiguous, its address even, n < 2^32.

    On CUDA it is queued on the current stream and waits for it: what was queued there before is done on return.
    Raises ValueError or TypeError for another tensor.
    """
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise TypeError(f"bytes must be uint8 [n], got {data.dtype} {tuple(data.shape)}")
    if not data.is_contiguous() or data.data_ptr() % 2 or len(data) >= _MAX_BYTES:
        raise ValueError(f"{len(data)} bytes at {data.data_ptr():#x}, or not contiguous")
    if uses_triton(data.device, backend):
        from tandem.kernels.payload_checksum.triton import weighted_sum_triton

        weighted = weighted_sum_triton(data)
    else:
        weighted = weighted_sum_reference(data)
    low, high = len(data) % (1 << 16), len(data) >> 16
    return (low + high * BASE + int(weighted)) % MODULUS
