"""Loads at start all C code that a step on the CPU may run: no request waits for a compiler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tandem.kernels.cpu_library import CpuLibrary, library_of

OPERATIONS = (
    "prepacked_linear", "paged_decode", "extend_attention", "kv_store", "rms_norm", "rope", "silu_mul", "fused_layer",
    "deterministic_linear", "quantized_linear", "widened_linear", "float_linear", "token_mask",
)  # fmt: skip


def prepare() -> bool:
    """Load everything, compiling side by side where needed, which takes seconds. True if all is available."""
    with ThreadPoolExecutor(len(OPERATIONS)) as pool:
        return all(list(pool.map(CpuLibrary.is_available, map(library_of, OPERATIONS))))
