"""The bytes of a KV transfer in host memory: copies with their checksum, re-blocking, conversion, wire codecs.

A payload is `[blocks, layers, planes, heads, tokens, width]`, contiguous; checksums are CRC-32 as `zlib.crc32`. With
the native library a checksum is taken while the bytes are copied; without it the results are the same, slower. All
functions are thread-safe as far as they touch different memory; buffers are borrowed for the call. Every index and
size is checked here, for the C code checks nothing. Imports torch only to convert where there is no native library.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from tandem.core.kv_layout import DTYPE_BYTES
from tandem.kernels.kv_payload import portable
from tandem.kernels.kv_payload.binding import CODECS, library
from tandem.kernels.kv_payload.shape import PoolShape, check_place, check_slice, is_within

__all__ = [
    "CODECS", "PoolShape", "convert", "copy", "crc32", "decode", "encode", "encoded_bytes", "gather",
    "is_within", "prepare", "reblock", "scatter",
]  # fmt: skip

SCALE_BYTES = 4


def prepare() -> bool:
    """Load the native library, or compile it, which takes seconds. True if there is one. To be called at start."""
    return library() is not None


def gather(
    pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, out: memoryview
) -> int:
    """Copy the named slices of `pool` into `out`, which has exactly their size; return its CRC-32.

    Raises ValueError for an index or a size that does not fit, before anything is written.
    """
    check_slice(shape, pool.nbytes, blocks, layers, heads, out.nbytes)
    return (library() or portable).move("gather", pool, shape, blocks, layers, heads, out)


def scatter(
    pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, payload: memoryview
) -> int:
    """Inverse of `gather`: copy `payload` into the named slices; return the CRC-32 of the written bytes. Errors as
    there."""
    check_slice(shape, pool.nbytes, blocks, layers, heads, payload.nbytes)
    return (library() or portable).move("scatter", pool, shape, blocks, layers, heads, payload)


def reblock(
    pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, out: memoryview,
    *, offset_tokens: int, target_tokens: int,
) -> int:  # fmt: skip
    """Copy the tokens of `blocks`, from the token `offset_tokens` of the first on, into blocks of `target_tokens`.

    `out` is `[targets, layers, planes, heads, target_tokens, width]`; tokens past the last source block are zeros.
    Returns its CRC-32; raises ValueError as `gather`, and for a size that is no whole number of target blocks.
    """
    check_place(shape, pool.nbytes, blocks, layers, heads)
    if target_tokens < 1 or not 0 <= offset_tokens < shape.block_tokens:
        raise ValueError(f"blocks of {target_tokens} tokens from token {offset_tokens} of {shape.block_tokens} on")
    target_bytes = len(layers) * shape.planes * len(heads) * target_tokens * shape.row_bytes
    targets, rest = divmod(out.nbytes, target_bytes)
    if rest:
        raise ValueError(f"a buffer of {out.nbytes} bytes for blocks of {target_bytes}")
    return (library() or portable).reblock(
        pool, shape, blocks, layers, heads, out,
        offset_tokens=offset_tokens, target_tokens=target_tokens, targets=targets,
    )  # fmt: skip


def copy(source: memoryview, target: memoryview) -> int:
    """Copy one buffer into another of the same size; return its CRC-32. Raises ValueError if the sizes differ."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes for a buffer of {target.nbytes}")
    return (library() or portable).copy(source, target)


def crc32(data: memoryview) -> int:
    """CRC-32 of a contiguous buffer, as `zlib.crc32`."""
    return (library() or zlib).crc32(data)


def convert(source: memoryview, from_dtype: str, target: memoryview, to_dtype: str) -> None:
    """Convert numbers of one dtype to another: float32, bfloat16, float16, each to each.

    Rounds to nearest, ties to even, as torch's `.to`; NaN becomes the plain NaN. Raises ValueError for an unknown dtype
    or for sizes that do not fit, ModuleNotFoundError where there is neither native library nor torch.
    """
    count = _count(source, from_dtype)
    if count != _count(target, to_dtype):
        raise ValueError(f"{source.nbytes} bytes of {from_dtype} for {target.nbytes} of {to_dtype}")
    _converter().convert(from_dtype, to_dtype, source, target, count)


def encoded_bytes(rows: int, row_size: int) -> int:
    """Bytes of `rows` encoded rows of `row_size` numbers: a float32 scale a row, all of them first; then the codes."""
    return rows * (SCALE_BYTES + row_size)


def encode(codec: str, source: memoryview, dtype: str, out: memoryview, *, row_size: int) -> None:
    """Quantise rows of `row_size` numbers, as `reference.py` specifies, into `encoded_bytes`. Errors as `convert`."""
    rows = _rows(codec, source, dtype, out, row_size)
    _converter().encode(codec, dtype, source, out, rows, row_size)


def decode(codec: str, payload: memoryview, out: memoryview, dtype: str, *, row_size: int) -> None:
    """Inverse of `encode` up to its rounding. Errors as `convert`."""
    rows = _rows(codec, out, dtype, payload, row_size)
    _converter().decode(codec, dtype, payload, out, rows, row_size)


def _converter() -> Any:
    """The native library, or the module with its methods of the same names and arguments."""
    if (native := library()) is not None:
        return native
    from tandem.kernels.kv_payload import reference

    return reference


def _count(buffer: memoryview, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
    count, rest = divmod(buffer.nbytes, DTYPE_BYTES[dtype])
    if rest:
        raise ValueError(f"{buffer.nbytes} bytes are no whole number of {dtype}")
    return count


def _rows(codec: str, plain: memoryview, dtype: str, encoded: memoryview, row_size: int) -> int:
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: expected one of {', '.join(CODECS)}")
    rows, rest = divmod(_count(plain, dtype), row_size) if row_size > 0 else (0, 1)
    if rest or encoded.nbytes != encoded_bytes(rows, row_size):
        raise ValueError(f"{plain.nbytes} bytes of {dtype} in rows of {row_size} for {encoded.nbytes} encoded")
    return rows
