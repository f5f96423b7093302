"""extend_attention by the C code in cpu.c, in bfloat16 with AVX-512; shapes and types are checked by its caller."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from torch import Tensor

from tandem.kernels.cpu_library import CpuLibrary
from tandem.kernels.layer_view import KEY_PLANE, VALUE_PLANE
from tandem.kernels.packed_attention import AttentionSpec

LIBRARY = CpuLibrary(Path(__file__).with_name("cpu.c"), "tandem_extend_attention")
_WIDTHS = range(32, 257, 32)
_STEP = 32
_MOST_TOKENS = 2**31 - 1  # positions are int32
_SHORT, _OUTSIDE, _NO_ROWS = 1, 2, 3  # enum answer


def takes(q: Tensor, layer_view: Tensor) -> bool:
    """True if the C code is available and has this case.

    Measured beside torch's flash kernel on two cores: half of its time with a matrix unit, a fifth to a seventh with
    vectors on a machine that has none (torch multiplies on the matrix unit where there is one, and hardly at all in
    bfloat16 where there is none)."""
    is_bf16 = q.dtype is torch.bfloat16 and layer_view.dtype is torch.bfloat16
    return is_bf16 and q.shape[2] in _WIDTHS and LIBRARY.is_available()


def extend_attention_native(
    q: Tensor, layer_view: Tensor, cu_seqlens: Tensor, block_table: Tensor, context_lens: Tensor, spec: AttentionSpec
) -> Tensor:
    """See `extend_attention`; for cases that `takes` accepts. Runs on as many threads as torch does."""
    tokens, q_heads, width = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    cu_seqlens, context_lens = cu_seqlens.contiguous(), context_lens.contiguous()
    num_blocks, _, kv_heads, block_tokens, _ = layer_view.shape
    blocks, planes, heads = layer_view.stride()[:3]
    room = torch.empty(room_bytes(int(context_lens.max()), kv_heads, width), dtype=torch.uint8)
    out = torch.empty((tokens, q_heads, width), dtype=q.dtype)
    (softcap,) = struct.unpack("q", struct.pack("d", spec.softcap or 0.0))
    answer = LIBRARY.call((
        num_blocks, block_table.shape[1], tokens, q.data_ptr(), layer_view.data_ptr(), out.data_ptr(),
        block_table.data_ptr(), cu_seqlens.data_ptr(), context_lens.data_ptr(),
        0 if spec.sinks is None else spec.sinks.data_ptr(), room.data_ptr(),
        context_lens.shape[0], kv_heads, q_heads // kv_heads, width, block_tokens,
        q.stride(0), q.stride(1), block_table.stride(0), blocks * 2, planes * (VALUE_PLANE - KEY_PLANE) * 2, heads * 2,
        min(spec.window or 0, _MOST_TOKENS), torch.get_num_threads(), softcap,
    ), spec.scale)  # fmt: skip
    if answer == _OUTSIDE:
        raise IndexError("block_table or context_lens name blocks that the pool or the table does not have")
    if answer == _NO_ROWS:
        raise ValueError(f"cu_seqlens names rows that q does not have: it has {tokens}")
    if answer == _SHORT:
        raise ValueError("a sequence has more queries than tokens in its context")
    return out


def room_bytes(context: int, kv_heads: int, width: int) -> int:
    """Bytes of memory into which keys and values of the longest sequence of a call are packed."""
    return 64 + 4 * kv_heads * width * -(-(context + _STEP - 1) // _STEP) * _STEP
