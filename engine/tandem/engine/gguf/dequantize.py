"""Converts the blocks that GGUF files store to numbers, equal to the bit to the results of `gguf.quants`.

    blocks   uint8 [n, bytes of a block]      numbers   fp32 [n, numbers of a block]

As ggml's quants.c has them, products and sums one by one and never fused. It must not know about files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Dequantize = Callable[[Tensor], Tensor]
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize(name: str, blocks: Tensor) -> Tensor:
    """Of blocks of the type `name`, for F32 the same memory; KeyError unless it is one of `DEQUANTIZE`."""
    return DEQUANTIZE[name](blocks)


def _plain(dtype: torch.dtype) -> Dequantize:
    return lambda blocks: blocks.view(dtype).float()


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at a byte of every block, as fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Numbers of so many bits, uint8: the lowest of `run` bytes, then the next ones of the same bytes, and so on."""
    runs = packed.reshape(len(packed), packed.shape[1] // run, run)
    # Shifts by one number are far faster than by a tensor of them.
    return torch.stack([runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], 2).flatten(1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits in 4 bytes, the lowest first, each moved to where a fifth bit is."""
    return _fields(blocks[:, at : at + 4], 1, 1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_fields(blocks[:, 2:], 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _fields(blocks[:, 4:], 4, 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (numbers.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * numbers.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    """16 scales and minima of 4 bits, one for 16 numbers of 2 bits each."""
    scales, numbers = blocks[:, :16], _fields(blocks[:, 16:80], 2, 32).float()
    scale, least = _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    return (scale[..., None] * numbers.view(-1, 16, 16) - least[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """16 scales of 6 bits; a third bit that is not set takes 4 off."""
    third, packed = blocks[:, :32], blocks[:, 96:108]
    numbers = _fields(blocks[:, 32:96], 2, 32).float() - 4 * (_fields(third, 1, 32) ^ 1).float()
    scales = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4
    scale = _half(blocks, 108) * (scales.float() - 32)
    return (scale[..., None] * numbers.view(-1, 16, 16)).flatten(1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minima out of 12 bytes: the first four of each have their low six bits to themselves; of the last
    four the low halves share the last bytes, and the top two bits are in the first bytes' top two."""
    first, second, halves = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (halves & 15) | (first >> 2 & 48)), 1)
    minima = torch.cat((second & 63, (halves >> 4) | (second >> 2 & 48)), 1)
    return scales.float(), minima.float()


def _of_eight(blocks: Tensor, numbers: Tensor) -> Tensor:
    """`numbers` in runs of 32, each with a scale and a minimum."""
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return (scale[..., None] * numbers.float().view(-1, 8, 32) - least[..., None]).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _of_eight(blocks, _fields(blocks[:, 16:], 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _of_eight(blocks, _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scale[..., None] * (numbers.float() - 32).view(-1, 16, 16)).flatten(1)


def _from_table(table: tuple[int, ...], places: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float32).index_select(0, places.flatten().int()).view(places.shape)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _from_table(_IQ4, _fields(blocks[:, 2:], 4, 16))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """8 scales of 6 bits: two high ones of each in 2 bytes, then four low ones in 4, and 32 numbers of 4 bits each."""
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    scale = _half(blocks, 0) * (scales.float() - 32)
    numbers = _from_table(_IQ4, _fields(blocks[:, 8:], 4, 16))
    return (scale[..., None] * numbers.view(-1, 8, 32)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """The scale is a power of two, halved because the table is doubled. The two smallest are not normal fp32
    numbers."""
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1).clamp(0) << 23)
    return bits.view(torch.float32) * _from_table(_E2M1_DOUBLED, _fields(blocks[:, 1:], 4, 16))


DEQUANTIZE: dict[str, Dequantize] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""By the name of a type. The others have tables of thousands of numbers, or are for activations alone."""
