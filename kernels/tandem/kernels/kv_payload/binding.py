"""The C library's functions with their types; no checks. Calls above a few kilobytes release the interpreter lock."""

from __future__ import annotations

import ctypes
import logging
import zlib
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tandem.core.kv_compatibility import Codec
from tandem.core.logs import event
from tandem.kernels import native
from tandem.kernels.kv_payload.shape import PoolShape

SOURCE = Path(__file__).with_name("cpu.c")
_QUICK_BYTES = 16 << 10
"""Below this size a call ends sooner than the interpreter lock could be acquired again."""
_SCALE_BYTES = 4
CODECS = {codec.label: codec.value for codec in Codec if codec}
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # numbered as in cpu.c, as codecs are
_log = logging.getLogger(__name__)

_u64, _u32, _size, _int, _address = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p


class _Slice(ctypes.Structure):
    """`struct slice` of cpu.c."""

    _fields_ = tuple(
        (name, _u64) for name in ("block_stride", "first", "outer", "outer_stride", "inner", "inner_stride", "run")
    )


class _Reblock(ctypes.Structure):
    """`struct reblock` of cpu.c."""

    _fields_ = tuple(
        (name, _u64)
        for name in (
            "block_stride", "first", "layers", "layer_stride", "planes", "plane_stride", "heads", "head_stride",
            "row", "source_tokens", "target_tokens", "targets", "offset",
        )
    )  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # the result's type, then the arguments'
    "gather": (_u32, _address, _address, _size, ctypes.POINTER(_Slice), _address),
    "scatter": (_u32, _address, _address, _size, ctypes.POINTER(_Slice), _address),
    "plain_gather": (None, _address, _address, _size, ctypes.POINTER(_Slice), _address),
    "plain_scatter": (None, _address, _address, _size, ctypes.POINTER(_Slice), _address),
    "reblock": (_u32, _address, _address, _size, ctypes.POINTER(_Reblock), _address),
    "copy": (_u32, _address, _address, _size),
    "crc32": (_u32, _address, _size),
    "convert": (None, _int, _int, _address, _address, _size),
    "encode": (None, _int, _int, _address, _address, _address, _size, _size),
    "decode": (None, _int, _int, _address, _address, _address, _size, _size),
    "choose_path": (_int, ctypes.c_char_p),
    "path": (ctypes.c_char_p,),
}


class Library:
    """`call(name, work_bytes, …)` with the arguments of the C function `tandem_<name>`."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        quick = ctypes.PyDLL(loaded._name, handle=loaded._handle)
        self._releasing = {name: _typed(loaded, name) for name in _SIGNATURES}
        self._holding = {name: _typed(quick, name) for name in _SIGNATURES}

    def call(self, name: str, work_bytes: int, *arguments: Any) -> Any:
        functions = self._holding if work_bytes < _QUICK_BYTES else self._releasing
        return functions[name](*arguments)

    def move(
        self, name: str, pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range,
        payload: memoryview,
    ) -> int:  # fmt: skip
        """`gather` or `scatter`: the CRC-32 of the payload; with `plain_` before it, without one: 0."""
        ids = array("I", blocks)
        if len(heads) == shape.heads:
            runs = (1, 0, 1, 0, len(layers) * shape.layer_bytes)
        else:
            runs = (len(layers), shape.layer_bytes, shape.planes, shape.plane_bytes, len(heads) * shape.head_bytes)
        at = _Slice(shape.block_bytes, shape.first(layers, heads), *runs)
        is_scatter = name.endswith("scatter")
        with (
            native.address_of(pool, writable=is_scatter) as here,
            native.address_of(payload, writable=not is_scatter) as there,
        ):
            return int(self.call(name, payload.nbytes, here, ids.buffer_info()[0], len(ids), at, there) or 0)

    def reblock(
        self, pool: memoryview, shape: PoolShape, blocks: Sequence[int], layers: range, heads: range, out: memoryview,
        *, offset_tokens: int, target_tokens: int, targets: int,
    ) -> int:  # fmt: skip
        ids = array("I", blocks)
        at = _Reblock(
            shape.block_bytes, shape.first(layers, heads), len(layers), shape.layer_bytes, shape.planes,
            shape.plane_bytes, len(heads), shape.head_bytes, shape.row_bytes, shape.block_tokens, target_tokens,
            targets, offset_tokens,
        )  # fmt: skip
        with native.address_of(pool) as here, native.address_of(out, writable=True) as there:
            return int(self.call("reblock", out.nbytes, here, ids.buffer_info()[0], len(ids), at, there))

    def copy(self, source: memoryview, target: memoryview) -> int:
        with native.address_of(source) as here, native.address_of(target, writable=True) as there:
            return int(self.call("copy", source.nbytes, there, here, source.nbytes))

    def crc32(self, data: memoryview) -> int:
        with native.address_of(data) as here:
            return int(self.call("crc32", data.nbytes, here, data.nbytes))

    def convert(self, from_dtype: str, to_dtype: str, source: memoryview, target: memoryview, count: int) -> None:
        with native.address_of(source) as here, native.address_of(target, writable=True) as there:
            self.call("convert", source.nbytes, _DTYPES[from_dtype], _DTYPES[to_dtype], here, there, count)

    def encode(self, codec: str, dtype: str, source: memoryview, out: memoryview, rows: int, row_size: int) -> None:
        with native.address_of(source) as here, native.address_of(out, writable=True) as scales:
            codes = scales + _SCALE_BYTES * rows
            self.call("encode", source.nbytes, CODECS[codec], _DTYPES[dtype], here, scales, codes, rows, row_size)

    def decode(self, codec: str, dtype: str, payload: memoryview, out: memoryview, rows: int, row_size: int) -> None:
        with native.address_of(payload) as scales, native.address_of(out, writable=True) as there:
            codes = scales + _SCALE_BYTES * rows
            self.call("decode", out.nbytes, CODECS[codec], _DTYPES[dtype], scales, codes, there, rows, row_size)

    def path(self) -> str:
        """Name of the instructions that compute the checksum: `vpclmul`, `pclmul`, `arm-crc` or `table`."""
        return bytes(self.call("path", 0)).decode()

    def choose_path(self, name: str) -> bool:
        """For tests: use the path `name` ("" = the best) from now on; False if this CPU cannot."""
        return bool(self.call("choose_path", 0, name.encode()))


def library() -> Library | None:
    """The library, built at the first call; None where there is none, or `TANDEM_NATIVE=0`."""
    return _library() if native.is_enabled() else None


@cache
def _library() -> Library | None:
    loaded = native.load(SOURCE)
    if loaded is None:
        return None
    made = Library(loaded)
    sample = memoryview(bytes(range(256)) * 5 + b"tail")
    if any(made.crc32(sample[:size]) != zlib.crc32(sample[:size]) for size in (0, 7, 300, len(sample))):
        event(_log, "native code is wrong on this machine", logging.ERROR, source=SOURCE.name, path=made.path())
        return None
    return made


def _typed(loaded: ctypes.CDLL, name: str) -> Any:
    function = getattr(loaded, f"tandem_{name}")
    function.restype, *function.argtypes = _SIGNATURES[name]
    return function
