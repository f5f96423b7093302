"""All layers of few rows in one call, attention to paged KV among them: no Python between two layers."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.fused_layer.row import LIBRARY, DenseRow
from tandem.kernels.layer_view import check_layer_view

_STEP = 2
_NO_MEMORY, _OUTSIDE = 1, 2  # enum answer
# Places in what the code is given: the kind of call, threads, the scale's bits, `struct step` with a `struct decode` at
# its end, the layers. step.h holds the structs to these places.
_THREADS, _X, _COS, _SIN, _STRIDE, _SLOTS, _BLOCKS, _DECODE = 1, 3, 4, 5, 6, 7, 12, 14
_TABLE, _LENGTHS, _BATCH = _DECODE + 3, _DECODE + 4, _DECODE + 6
_MAX_BLOCKS, _TABLE_STRIDE = _DECODE + 12, _DECODE + 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """KV places of sequences; each row is the last token of one.

    tables: int32 `[rows, blocks]`; lengths: int32 `[rows]`, tokens with the row's own; slots: int64 `[rows]`, where the
    KV of that one goes, block · block_tokens + offset. Lengths and slots are contiguous.
    """

    tables: Tensor
    lengths: Tensor
    slots: Tensor


class DenseLayers:
    """Made by `join`. Owns memory for intermediate results; one thread may use it, with as many as torch has at work.

    A call takes up to `most_rows` rows.
    """

    def __init__(self, rows: Sequence[DenseRow], views: Sequence[Tensor], scale: float) -> None:
        self._kept = (tuple(rows), tuple(views))
        self._eps = rows[0].eps
        num_blocks, _, kv_heads, block_tokens, width = views[0].shape
        self._slots = num_blocks * block_tokens
        strides = [stride * views[0].element_size() for stride in views[0].stride()[:3]]
        turning = rows[0].turning
        first, columns, heads = rows[0], (turning + kv_heads) * width, turning - kv_heads
        self.most_rows, self._blocks_bytes = min(row.stack_rows for row in rows), max(row.blocks_bytes for row in rows)
        self._blocks = torch.empty(0, dtype=torch.uint8)
        widths = (columns, first.width, 2 * first.inner, first.width, heads * width)
        self._between = [torch.empty((self.most_rows, one), dtype=torch.bfloat16) for one in widths]
        *between, mixed = (room.data_ptr() for room in self._between)
        (scale_bits,) = struct.unpack("i", struct.pack("f", scale))
        step = (0, 0, 0, 0, 0, *between, 0, len(rows))
        decode = (
            between[0], 0, mixed, 0, 0, 0, 1, kv_heads, heads // kv_heads, width, block_tokens, num_blocks, 0, columns,
            0, *strides, 1, 1, 1,
        )  # fmt: skip
        layers = [
            number for row, view in zip(rows, views, strict=True) for number in (*row.addresses(), view.data_ptr())
        ]
        self._given = array("q", (_STEP, 1, scale_bits, *step, *decode, *layers))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, paged: PagedRows) -> Tensor:
        """x `[rows, width]`, contiguous, after all layers, written over; cos, sin `[rows, head_dim]` of one stride.

        Raises IndexError for slots or blocks outside the pool, also for a slot of -1, as no row is padding, and for
        lengths below 1; and MemoryError.
        """
        slots, lengths = paged.slots, paged.lengths
        if not all(0 <= slot < self._slots for slot in slots.tolist()):
            raise IndexError("a row's slot is none that the pool has")
        if min(lengths.tolist()) < 1:
            raise IndexError("a row's length leaves its own token out of the pool")
        tables = paged.tables if paged.tables.stride(1) == 1 else paged.tables.contiguous()
        given = self._given
        given[_THREADS] = threads = torch.get_num_threads()
        if self._blocks.numel() != threads * self._blocks_bytes:
            self._blocks = torch.empty(threads * self._blocks_bytes, dtype=torch.uint8)
            given[_BLOCKS] = self._blocks.data_ptr() if self._blocks_bytes else 0
        given[_X], given[_COS], given[_SIN], given[_STRIDE] = (
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
        )
        given[_SLOTS], given[_LENGTHS], given[_BATCH] = slots.data_ptr(), lengths.data_ptr(), x.shape[0]
        given[_TABLE], given[_MAX_BLOCKS], given[_TABLE_STRIDE] = tables.data_ptr(), tables.shape[1], tables.stride(0)
        answer = LIBRARY.call_with(given, self._eps)
        if answer == _OUTSIDE:
            raise IndexError("a row's table or its length name blocks that the pool or the table does not have")
        if answer == _NO_MEMORY:
            raise MemoryError("no memory for the parts of attention")
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
