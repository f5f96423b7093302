"""The view of one layer in a paged KV pool: its shape, its checks, and the gathering of a sequence's keys and values.

    pool        [num_blocks, group_layers, planes, heads, block_tokens, width]   contiguous
    layer view  pool[:, layer] = [num_blocks, planes, heads, block_tokens, width]   strided over blocks

Plane 0 holds keys, plane 1 values. A pool of one plane holds rows that are both (a latent, DeepSeek-V2, section 2.1):
its view has two planes in the same memory (`key_value_view`). Inside (block, plane, head) the `block_tokens x width`
numbers are contiguous: the *row* in which this module counts. It must not know about attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.dtypes import TORCH_DTYPES

KEY_PLANE = 0
VALUE_PLANE = 1


def key_value_view(layer_view: Tensor) -> Tensor:
    """`[num_blocks, 2, heads, block_tokens, width]` of a layer of one plane or two, without a copy."""
    return layer_view.expand(-1, 2, -1, -1, -1) if layer_view.shape[1] == 1 else layer_view


def is_shared(layer_view: Tensor) -> bool:
    """True if keys and values are the same memory."""
    return layer_view.stride(1) == 0


def check_layer_view(layer_view: Tensor) -> None:
    """Raise ValueError unless `layer_view` is `[blocks, 2, heads, block_tokens, width]` with contiguous rows."""
    if layer_view.dim() != 5 or layer_view.shape[1] != 2:
        raise ValueError(
            f"layer_view must be [num_blocks, 2, heads, block_tokens, width], got {tuple(layer_view.shape)}"
        )
    width = layer_view.shape[4]
    if layer_view.stride(4) != 1 or layer_view.stride(3) != width:
        raise ValueError(f"layer_view must hold contiguous [block_tokens, width] rows, strides {layer_view.stride()}")
    row = layer_view.shape[3] * width
    if any(stride % row for stride in layer_view.stride()[:3]):
        raise ValueError(f"layer_view strides must be whole rows of {row} elements, got {layer_view.stride()}")


def check_dtypes(layer_view: Tensor, **others: Tensor) -> None:
    """Raise TypeError naming a tensor that cannot be converted to the view's dtype or back: floats only."""
    for name, tensor in (("layer_view", layer_view), *others.items()):
        if tensor.dtype not in TORCH_DTYPES.values():
            raise TypeError(f"{name} is {tensor.dtype}, which is none of {', '.join(map(str, TORCH_DTYPES.values()))}")


def check_attention_arguments(q: Tensor, layer_view: Tensor, block_table: Tensor, context_lens: Tensor) -> None:
    """Raise ValueError or TypeError naming the argument of a paged attention operation that does not fit."""
    check_layer_view(layer_view)
    if q.dim() != 3:
        raise ValueError(f"q must be [tokens, q_heads, width], got {tuple(q.shape)}")
    if q.shape[2] != layer_view.shape[4]:
        raise ValueError(f"q has width {q.shape[2]}, layer_view {layer_view.shape[4]}")
    if q.shape[1] % layer_view.shape[2]:
        raise ValueError(f"{q.shape[1]} q heads are no multiple of {layer_view.shape[2]} kv heads")
    check_dtypes(layer_view, q=q)
    if block_table.dtype != torch.int32 or context_lens.dtype != torch.int32:
        raise TypeError(f"block_table and context_lens must be int32, got {block_table.dtype}, {context_lens.dtype}")
    if block_table.dim() != 2 or context_lens.shape != block_table.shape[:1]:
        raise ValueError(
            "block_table must be [sequences, max_blocks] and context_lens [sequences], "
            f"got {tuple(block_table.shape)} and {tuple(context_lens.shape)}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, sequences: int) -> None:
    """Raise ValueError or TypeError unless `cu_seqlens` has the bounds of so many sequences' query rows."""
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}")
    if cu_seqlens.shape != (sequences + 1,):
        raise ValueError(f"cu_seqlens must be [{sequences + 1}], got {tuple(cu_seqlens.shape)}")


def gather_tokens(layer_view: Tensor, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy whole blocks out of the view, side by side, as keys and values in `dtype`.

    block_ids: `[n, blocks]`, any integer dtype. Returns two tensors `[n * heads, blocks * block_tokens, width]`, head
    fastest in the first dimension; the same one twice where the memory is shared. One copy, and one more where the
    view's dtype is another: the view is read as a matrix of rows, so that the copied rows land in their final order.
    Raises IndexError for a block id outside the view (CPU).
    """
    num_blocks, _, heads, block_tokens, width = layer_view.shape
    row = block_tokens * width
    rows_per_block, rows_per_head = layer_view.stride(0) // row, layer_view.stride(2) // row
    head_rows = torch.arange(0, heads * rows_per_head, rows_per_head, device=layer_view.device)
    index = torch.add(head_rows[:, None], block_ids[:, None, :], alpha=rows_per_block).view(-1)
    matrix_rows = (num_blocks - 1) * rows_per_block + (heads - 1) * rows_per_head + 1
    planes = []
    for plane in (KEY_PLANE, VALUE_PLANE)[: 1 if is_shared(layer_view) else 2]:
        matrix = layer_view[:, plane].as_strided((matrix_rows, row), (row, 1))
        gathered = matrix.index_select(0, index).to(dtype)
        planes.append(gathered.view(-1, block_ids.shape[1] * block_tokens, width))
    return planes[0], planes[-1]
