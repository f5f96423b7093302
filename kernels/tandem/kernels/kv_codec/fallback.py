"""Conversion and codecs over plain buffers by the torch reference. Imported only where there is no native library."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.dtypes import TORCH_DTYPES
from tandem.kernels.kv_codec.reference import convert_reference, decode_reference, encode_reference


def convert(source: memoryview, from_dtype: str, target: memoryview, to_dtype: str) -> None:
    """See `kv_codec.convert`."""
    _put(target, convert_reference(_read(source, TORCH_DTYPES[from_dtype]), TORCH_DTYPES[to_dtype]))


def encode(codec: str, source: memoryview, dtype: str, out: memoryview, rows: int, row_size: int) -> None:
    """See `kv_codec.encode`."""
    scales, codes = encode_reference(codec, _read(source, TORCH_DTYPES[dtype]).view(rows, row_size))
    _put(out[: 4 * rows], scales)
    _put(out[4 * rows :], codes)


def decode(codec: str, payload: memoryview, out: memoryview, dtype: str, rows: int, row_size: int) -> None:
    """See `kv_codec.decode`."""
    scales, codes = _read(payload[: 4 * rows], torch.float32), _read(payload[4 * rows :], torch.uint8)
    _put(out, decode_reference(codec, scales, codes.view(rows, row_size), TORCH_DTYPES[dtype]))


def _read(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """The numbers of a buffer of any alignment, copied: torch warns of read-only memory."""
    return torch.frombuffer(bytearray(buffer), dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)


def _put(target: memoryview, x: Tensor) -> None:
    if len(target):
        torch.frombuffer(target, dtype=torch.uint8).copy_(x.contiguous().view(-1).view(torch.uint8))
