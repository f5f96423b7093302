"""The bytes of a KV transfer in host memory: copies with their checksum, re-blocking, conversion, wire codecs.

A payload is `[blocks, layers, planes, heads, tokens, width]`, contiguous; checksums are CRC-32 as `zlib.crc32`. With
the native library a checksum is taken while the bytes are copied; without it the results are the same, slower. All
functions are thread-safe as far as they touch different memory; buffers are borrowed for the call. Every index and
size is checked here, for the C code checks nothing. Imports torch only to convert where there is no native library.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tandem.core.kv_compatibility import Codec
from tandem.core.kv_layout import DTYPE_BYTES
from tandem.kernels.kv_codec import portable
from tandem.kernels.kv_codec.binding import library
from tandem.kernels.kv_codec.shape import PoolShape, check_place, check_slice, is_within

__all__ = [
    "CODECS", "PoolShape", "convert", "copy", "crc32", "decode", "encode", "encoded_bytes", "gather",
    "is_within", "prepare", "reblock", "scatter",
]  # fmt: skip

CODECS = {codec.label: codec.value for codec in Codec if codec}
SCALE_BYTES = 4
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # numbered as in cpu.c, as codecs are


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
    native = library()
    if native is None:
        return portable.gather(pool, shape, blocks, layers, heads, out)
    return native.move("gather", pool, shape, blocks, layers, heads, out)


def scatter(
    pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, payload: memoryview
) -> int:
    """Inverse of `gather`: copy `payload` into the named slices; return the CRC-32 of the written bytes. Errors as
    there."""
    check_slice(shape, pool.nbytes, blocks, layers, heads, payload.nbytes)
    native = library()
    if native is None:
        return portable.scatter(pool, shape, blocks, layers, heads, payload)
    return native.move("scatter", pool, shape, blocks, layers, heads, payload)


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
    move = portable.reblock if (native := library()) is None else native.reblock
    return move(
        pool, shape, blocks, layers, heads, out,
        offset_tokens=offset_tokens, target_tokens=target_tokens, targets=targets,
    )  # fmt: skip


def copy(source: memoryview, target: memoryview) -> int:
    """Copy one buffer into another of the same size; return its CRC-32. Raises ValueError if the sizes differ."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes for a buffer of {target.nbytes}")
    native = library()
    if native is not None:
        return native.copy(source, target)
    target.cast("B")[:] = source.cast("B")
    return zlib.crc32(target)


def crc32(data: memoryview) -> int:
    """CRC-32 of a contiguous buffer, as `zlib.crc32`."""
    native = library()
    return zlib.crc32(data) if native is None else native.crc32(data)


def convert(source: memoryview, from_dtype: str, target: memoryview, to_dtype: str) -> None:
    """Convert numbers of one dtype to another: float32, bfloat16, float16, each to each.

    Rounds to nearest, ties to even, as torch's `.to`; NaN becomes the plain NaN. Raises ValueError for an unknown dtype
    or for sizes that do not fit, ModuleNotFoundError where there is neither native library nor torch.
    """
    count = _count(source, from_dtype)
    if count != _count(target, to_dtype):
        raise ValueError(f"{source.nbytes} bytes of {from_dtype} for {target.nbytes} of {to_dtype}")
    native = library()
    if native is None:
        from tandem.kernels.kv_codec import fallback

        fallback.convert(source, from_dtype, target, to_dtype)
        return
    native.convert(_DTYPES[from_dtype], _DTYPES[to_dtype], source, target, count)


def encoded_bytes(rows: int, row_size: int) -> int:
    """Bytes of `rows` encoded rows of `row_size` numbers: a float32 scale a row, all of them first; then the codes."""
    return rows * (SCALE_BYTES + row_size)


def encode(codec: str, source: memoryview, dtype: str, out: memoryview, *, row_size: int) -> None:
    """Quantise rows of `row_size` numbers, as `reference.py` specifies, into `encoded_bytes`. Errors as `convert`."""
    rows = _rows(codec, source, dtype, out, row_size)
    native = library()
    if native is None:
        from tandem.kernels.kv_codec import fallback

        fallback.encode(codec, source, dtype, out, rows, row_size)
        return
    native.encode(CODECS[codec], _DTYPES[dtype], source, out, rows, row_size)


def decode(codec: str, payload: memoryview, out: memoryview, dtype: str, *, row_size: int) -> None:
    """Inverse of `encode` up to its rounding. Errors as `convert`."""
    rows = _rows(codec, out, dtype, payload, row_size)
    native = library()
    if native is None:
        from tandem.kernels.kv_codec import fallback

        fallback.decode(codec, payload, out, dtype, rows, row_size)
        return
    native.decode(CODECS[codec], _DTYPES[dtype], payload, out, rows, row_size)


def _count(buffer: memoryview, dtype: str) -> int:
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
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
