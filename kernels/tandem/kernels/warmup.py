"""Loads at start all C code that a step on the CPU may run: no request waits for a compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tandem.kernels import fused_layer, rms_norm, rope, silu_mul
from tandem.kernels.cpu_library import CpuLibrary
from tandem.kernels.deterministic_linear import packed as deterministic_linear
from tandem.kernels.extend_attention import binding as extend_attention
from tandem.kernels.kv_store import binding as kv_store
from tandem.kernels.packed_linear import packed
from tandem.kernels.paged_decode import binding as paged_decode
from tandem.kernels.quantized_linear import weight as quantized_linear
from tandem.kernels.widened_linear import LIBRARY as WIDENED_LINEAR

LIBRARIES: tuple[CpuLibrary, ...] = (
    packed.LIBRARY, paged_decode.LIBRARY, extend_attention.LIBRARY, kv_store.LIBRARY, rms_norm.LIBRARY, rope.LIBRARY,
    silu_mul.LIBRARY, fused_layer.LIBRARY, deterministic_linear.LIBRARY, quantized_linear.LIBRARY,
    WIDENED_LINEAR,
)  # fmt: skip


def prepare() -> bool:
    """Load everything, compiling side by side where needed, which takes seconds. True if all is available."""
    with ThreadPoolExecutor(len(LIBRARIES)) as pool:
        return all(list(pool.map(CpuLibrary.is_available, LIBRARIES)))
