"""Conversion and wire codecs in torch: the specification, and the fallback without native library.

Conversion is torch's `.to`, rounding to nearest, ties to even, except that every NaN becomes the plain quiet NaN of its
type (torch's own differ between its scalar and its vector code).

    int8   code = round(x / scale), scale = amax / 127, in -127 … 127; NaN is -128
    fp8    code = e4m3fn(x / scale), scale = amax / 448, in -448 … 448; NaN stays NaN

`amax` is the largest finite magnitude of a row; infinities become its largest code. A row of zeros has scale 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.dtypes import TORCH_DTYPES

MOST = {"int8": 127.0, "fp8": 448.0}


def convert_reference(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype; float32, bfloat16 and float16 each to each."""
    return _canonical(x.to(torch.float32).to(dtype))


def encode_reference(codec: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x`: `[rows, n]` of any of TORCH_DTYPES. Returns scales, float32 `[rows]`, and codes, uint8 `[rows, n]`."""
    values, most = x.to(torch.float32), MOST[codec]
    finite = torch.where(torch.isfinite(values), values.abs(), torch.zeros((), dtype=torch.float32))
    amax = finite.amax(1) if x.shape[1] else finite.new_zeros(x.shape[0])
    scales = amax / most
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales)
    quotients = (values / divisor[:, None]).clamp(-most, most)
    if codec == "fp8":
        codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
        return scales, torch.where(quotients.isnan(), torch.full_like(codes, 0x7F), codes)
    rounded = torch.where(quotients.isnan(), torch.full_like(quotients, -128.0), quotients.round())
    return scales, rounded.to(torch.int8).view(torch.uint8)


def decode_reference(codec: str, scales: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode_reference`, up to its rounding: `[rows, n]` of `dtype`."""
    if codec == "fp8":
        values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        values = codes.view(torch.int8).to(torch.float32)
        values = torch.where(codes == 128, torch.full_like(values, torch.nan), values)
    return _canonical((values * scales[:, None]).to(dtype))


def convert(from_dtype: str, to_dtype: str, source: memoryview, target: memoryview, _count: int) -> None:
    """See `kv_payload.convert`."""
    _put(target, convert_reference(_read(source, TORCH_DTYPES[from_dtype]), TORCH_DTYPES[to_dtype]))


def encode(codec: str, dtype: str, source: memoryview, out: memoryview, rows: int, row_size: int) -> None:
    """See `kv_payload.encode`."""
    scales, codes = encode_reference(codec, _read(source, TORCH_DTYPES[dtype]).view(rows, row_size))
    _put(out[: 4 * rows], scales)
    _put(out[4 * rows :], codes)


def decode(codec: str, dtype: str, payload: memoryview, out: memoryview, rows: int, row_size: int) -> None:
    """See `kv_payload.decode`."""
    scales, codes = _read(payload[: 4 * rows], torch.float32), _read(payload[4 * rows :], torch.uint8)
    _put(out, decode_reference(codec, scales, codes.view(rows, row_size), TORCH_DTYPES[dtype]))


def _canonical(x: Tensor) -> Tensor:
    """`x` with every NaN the one with clear sign and only the quiet bit set."""
    return torch.where(x.isnan(), torch.full((), torch.nan, dtype=x.dtype), x)


def _read(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    """The numbers of a buffer of any alignment, copied: torch warns of read-only memory."""
    return torch.frombuffer(bytearray(buffer), dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)


def _put(target: memoryview, x: Tensor) -> None:
    if len(target):
        torch.frombuffer(target, dtype=torch.uint8).copy_(x.contiguous().view(-1).view(torch.uint8))
