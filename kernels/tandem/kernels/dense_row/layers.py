"""All layers of a single row in one call, attention to paged KV among them: no Python between two layers."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.dense_row.row import LIBRARY, DenseRow
from tandem.kernels.layer_view import check_layer_view

_STEP = 2
_NO_MEMORY, _OUTSIDE = 1, 2  # enum answer
# Places in what the code is given: the kind of call, threads, the scale's bits, `struct step` with a `struct decode` at
# its end, the layers. step.h holds the structs to these places.
_THREADS, _X, _COS, _SIN, _SLOT, _DECODE = 1, 3, 4, 5, 8, 9
_TABLE, _LENGTHS, _MAX_BLOCKS = _DECODE + 3, _DECODE + 4, _DECODE + 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRow:
    """Where the KV of one sequence is, of which the row is the last token.

    table: int32 `[1, blocks]`; length: int32 `[1]`, tokens with the row's own; slot: int64 `[1]`, where that one's KV
    goes, block · block_tokens + offset.
    """

    table: Tensor
    length: Tensor
    slot: Tensor


class DenseLayers:
    """Made by `join`. Owns memory for what lies between; one thread may use it, with as many as torch has at work."""

    def __init__(self, rows: Sequence[DenseRow], views: Sequence[Tensor], scale: float) -> None:
        self._kept = (tuple(rows), tuple(views))
        self._eps = rows[0].eps
        num_blocks, _, kv_heads, block_tokens, width = views[0].shape
        self._slots = num_blocks * block_tokens
        blocks, planes, heads = (stride * views[0].element_size() for stride in views[0].stride()[:3])
        turning = rows[0].turning
        self._qkv = torch.empty(((turning + kv_heads) * width,), dtype=torch.bfloat16)
        self._mixed = torch.empty(((turning - kv_heads) * width,), dtype=torch.bfloat16)
        (scale_bits,) = struct.unpack("i", struct.pack("f", scale))
        group = (turning - kv_heads) // kv_heads
        step = (0, 0, 0, self._qkv.data_ptr(), len(rows), 0)
        decode = (
            self._qkv.data_ptr(), 0, self._mixed.data_ptr(), 0, 0, 0, 1, kv_heads, group, width, block_tokens,
            num_blocks, 0, 0, 0, blocks, planes, heads, 1, 1, 1,
        )  # fmt: skip
        layers = [
            number for row, view in zip(rows, views, strict=True) for number in (*row.addresses(), view.data_ptr())
        ]
        self._given = array("q", (_STEP, 1, scale_bits, *step, *decode, *layers))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, row: PagedRow) -> Tensor:
        """x `[1, width]`, contiguous, after all layers, written over; cos, sin `[1, head_dim]`.

        Raises IndexError for a slot or a block outside the pool, also for a slot of -1, as no row is padding, and for a
        length below 1; and MemoryError.
        """
        if not 0 <= (slot := int(row.slot)) < self._slots:
            raise IndexError("the row's slot is none that the pool has")
        if int(row.length) < 1:
            raise IndexError("the row's length leaves its own token out of the pool")
        table = row.table if row.table.stride(1) == 1 else row.table.contiguous()
        given = self._given
        given[_THREADS] = torch.get_num_threads()
        given[_X], given[_COS], given[_SIN], given[_SLOT] = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), slot
        given[_TABLE], given[_LENGTHS], given[_MAX_BLOCKS] = table.data_ptr(), row.length.data_ptr(), table.shape[1]
        answer = LIBRARY.call_with(given, self._eps)
        if answer == _OUTSIDE:
            raise IndexError("the row's table or its length name blocks that the pool or the table does not have")
        if answer == _NO_MEMORY:
            raise MemoryError("no memory for the parts of a row's attention")
        return x


def join(rows: Sequence[DenseRow | None], views: Sequence[Tensor], scale: float) -> DenseLayers | None:
    """Layers that attend to all of their context with this `scale`; views are those of `paged_decode`, one a layer.

    None where one has no code for single rows, or where they differ in more than their weights and places. Raises
    ValueError where there are not as many views as rows, or the first is none (see `check_layer_view`).
    """
    if len(rows) != len(views):
        raise ValueError(f"{len(rows)} rows, but {len(views)} views: every layer has one")
    if views:
        check_layer_view(views[0])  # the others are like it, or not joined
    fused = [row for row in rows if row is not None]
    if not rows or len(fused) < len(rows) or not LIBRARY.is_available():
        return None
    kinds = {(view.shape, view.stride(), view.dtype) for view in views}
    # All that the code takes from the first layer for all: its buffers are as large as that one needs.
    shapes = {(row.width, row.columns, row.mixed_width, row.inner, row.turning, row.head_dim, row.eps) for row in fused}
    view, first = views[0], fused[0]
    kv_heads, width = view.shape[2], view.shape[4]
    heads = first.turning - kv_heads
    is_alike = len(kinds) == len(shapes) == 1 and view.dtype is torch.bfloat16 and width == first.head_dim
    has_heads = first.columns == (heads + 2 * kv_heads) * width and heads % kv_heads == 0
    is_whole = first.mixed_width == heads * width
    return DenseLayers(fused, views, scale) if is_alike and has_heads and is_whole else None
