"""paged_decode by the C code in cpu.c, for CPUs with AVX2 or AVX-512; shapes and types are checked by its caller."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tandem.kernels.cpu_library import CpuLibrary
from tandem.kernels.packed_attention import AttentionSpec

LIBRARY = CpuLibrary(Path(__file__).with_name("cpu.c"), "tandem_paged_decode")
_WIDTHS = range(16, 513, 16)
_DTYPES = (torch.float32, torch.bfloat16)
_NO_MEMORY, _OUTSIDE = 1, 2  # enum answer


def takes(q: Tensor, layer_view: Tensor, spec: AttentionSpec) -> bool:
    """True if the C code is available and has this case: no window, no soft cap, float32 or bfloat16."""
    is_plain = spec.window is None and spec.softcap is None
    has_types = q.dtype in _DTYPES and layer_view.dtype in _DTYPES
    return is_plain and has_types and q.shape[2] in _WIDTHS and LIBRARY.is_available()


def paged_decode_native(
    q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `paged_decode`; for cases that `takes` accepts. Runs on as many threads as torch does."""
    batch, q_heads, width = q.shape
    if q.stride(2) != 1 or q.stride(1) != width:
        q = q.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    context_lens = context_lens.contiguous()
    num_blocks, _, kv_heads, block_tokens, _ = layer_view.shape
    number_bytes = layer_view.element_size()
    out = torch.empty((batch, q_heads, width), dtype=q.dtype)
    blocks, planes, heads = layer_view.stride()[:3]
    answer = LIBRARY.call((
        q.data_ptr(), layer_view.data_ptr(), out.data_ptr(), block_table.data_ptr(), context_lens.data_ptr(),
        0 if spec.sinks is None else spec.sinks.data_ptr(),
        batch, kv_heads, q_heads // kv_heads, width, block_tokens, num_blocks, block_table.shape[1],
        q.stride(0), block_table.stride(0), blocks * number_bytes, planes * number_bytes, heads * number_bytes,
        q.dtype is torch.bfloat16, layer_view.dtype is torch.bfloat16, torch.get_num_threads(),
    ), spec.scale)  # fmt: skip
    if answer == _OUTSIDE:
        raise IndexError("block_table or context_lens name blocks that the pool or the table does not have")
    if answer == _NO_MEMORY:
        raise MemoryError("no memory for the parts of paged decode")
    return out
