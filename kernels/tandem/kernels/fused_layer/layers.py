"""All layers of a step in one call, attention to paged KV among them: no Python between two layers."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels import extend_attention
from tandem.kernels.fused_layer.row import LIBRARY, DenseRow
from tandem.kernels.layer_view import check_layer_view

_STEP, _CHUNKS = 2, 7
_NO_MEMORY, _OUTSIDE = 1, 2  # enum answer
# Places in what the code is given: the kind of call, threads, the scale's bits, `struct step` with a `struct decode` at
# its end, the layers. step.h holds the structs to these places.
_THREADS, _X, _COS, _SIN, _STRIDE, _SLOTS, _BLOCKS, _DECODE = 1, 3, 4, 5, 6, 7, 12, 14
_TABLE, _LENGTHS, _BATCH = _DECODE + 3, _DECODE + 4, _DECODE + 6
_OUT, _MAX_BLOCKS, _TABLE_STRIDE = _DECODE + 2, _DECODE + 12, _DECODE + 14
_BETWEEN, _LAYERS = 8, 13  # of qkv, o_out, gate_up and added
# Of a `struct chunks`, which stands before the layers there.
_ROWS, _FIRST, _ENDS_ATTENDED, _CHUNK_BLOCKS = 0, 1, 2, 3
_NUMBERS, _UNPACKED, _EXTEND = 6, 7, 8
_CHUNK_TABLE, _STARTS, _CHUNK_LENGTHS = _EXTEND + 3, _EXTEND + 4, _EXTEND + 5
_ROOM, _SEQUENCES = _EXTEND + 7, _EXTEND + 8
_CHUNK_STRIDE = _EXTEND + 15


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedChunks:
    """KV places of sequences with several rows each, the last tokens of each.

    tables: int32 `[n, blocks]`; lengths: int32 `[n]`, tokens with those of the rows; starts: int32 `[n + 1]`, of the
    first of which sequence i has `starts[i] : starts[i + 1]`. Lengths and starts are contiguous.
    """

    tables: Tensor
    lengths: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """KV places of sequences; each row is the last token of one. Behind them there may be rows of `chunks`.

    tables: int32 `[n, blocks]`; lengths: int32 `[n]`, tokens with the row's own; slots: int64 `[rows]`, of chunks, too:
    where the KV of each goes, block · block_tokens + offset. Lengths and slots are contiguous.
    """

    tables: Tensor
    lengths: Tensor
    slots: Tensor
    chunks: PagedChunks | None = None


class DenseLayers:
    """Made by `join`. Owns memory for intermediate results; one thread may use it, with as many as torch has at work.

    A call takes up to `most_rows` rows, each the last of its sequence; `pass_chunks` any number, and chunks.
    """

    def __init__(self, rows: Sequence[DenseRow], views: Sequence[Tensor], scale: float) -> None:
        self._kept = (tuple(rows), tuple(views))
        self._eps, self.layers = rows[0].eps, len(rows)
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
        pools = [view.data_ptr() for view in views]
        layers = [number for row, pool in zip(rows, pools, strict=True) for number in (*row.addresses(), pool)]
        self._given = array("q", (_STEP, 1, scale_bits, *step, *decode, *layers))
        self._widths = (columns, first.width, first.gates_width, first.width, heads * width)
        attention = extend_attention.LIBRARY
        self.takes_chunks = (
            all(row.takes_any for row in rows) and width in extend_attention.WIDTHS and attention.is_available()
        )
        if not self.takes_chunks:
            return
        given = (_CHUNKS, *self._given[1 : _DECODE + 21])
        calls = attention.address("tandem_extend_check"), attention.address("tandem_extend_share")
        chunks = (
            0, 0, 0, 0, *calls, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0, 0, kv_heads, heads // kv_heads, width, block_tokens, columns, width, 0, *strides,
            0, 1, 0,
        )  # fmt: skip
        layers = [n for row, pool in zip(rows, pools, strict=True) for n in (*row.addresses(are_many=True), pool)]
        self._chunks_at, self._kv_heads, self._width = len(given), kv_heads, width
        self._block_tokens = block_tokens
        self._given_chunks = array("q", (*given, *chunks, *layers))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, paged: PagedRows) -> Tensor:
        """x `[rows, width]`, contiguous, after all layers, written over; cos, sin `[rows, head_dim]` of one stride.

        Raises IndexError for slots or blocks outside the pool, also for a slot of -1, as no row is padding, and for
        lengths below 1; and MemoryError.
        """
        slots, lengths = paged.slots, paged.lengths
        self._check(slots, lengths)
        tables = _with_whole_rows(paged.tables)
        given = self._given
        given[_THREADS] = threads = torch.get_num_threads()
        if self._blocks.numel() != threads * self._blocks_bytes:
            self._blocks = torch.empty(threads * self._blocks_bytes, dtype=torch.uint8)
            given[_BLOCKS] = self._blocks.data_ptr() if self._blocks_bytes else 0
        _place(given, x, cos, sin, tables, paged)
        _call(given, self._eps)
        return x

    def takes_at_once(self, rows: int, paged: PagedRows) -> bool:
        """True if a call takes them; others only `pass_chunks`, where it `takes_chunks`."""
        return paged.chunks is None and rows <= self.most_rows

    def pass_chunks(
        self, x: Tensor, cos: Tensor, sin: Tensor, paged: PagedRows, first: int, last: int, *, ends_attended: bool
    ) -> Tensor:
        """x `[rows, width]`, contiguous, after layers [first, last), written over, and what the last one's attention
        answered, `[rows, heads, head_dim]`; cos and sin as in a call. `ends_attended`: without what stands behind that.

        Only where it `takes_chunks`. Raises as a call does, also for sequences with more rows than tokens.
        """
        rows, threads, given, at = x.shape[0], torch.get_num_threads(), self._given_chunks, self._chunks_at
        self._check(paged.slots, paged.lengths)
        kept = [torch.empty((rows, width), dtype=torch.bfloat16) for width in self._widths]
        tables, mixed = _with_whole_rows(paged.tables), kept[-1]
        given[_THREADS], given[_LAYERS] = threads, last - first
        given[_BETWEEN : _BETWEEN + 4] = array("q", [part.data_ptr() for part in kept[:4]])
        given[_DECODE], given[_OUT] = kept[0].data_ptr(), mixed.data_ptr()
        _place(given, x, cos, sin, tables, paged)
        room, numbers, unpacked = self._kept[0][0].many_room(rows, threads)
        kept.append(room)
        given[at + _ROWS], given[at + _FIRST], given[at + _ENDS_ATTENDED] = rows, first, ends_attended
        given[at + _NUMBERS], given[at + _UNPACKED], given[at + _SEQUENCES] = numbers, unpacked, 0
        if (chunks := paged.chunks) is not None:
            tables = _with_whole_rows(chunks.tables)
            context = tables.shape[1] * self._block_tokens
            packed = torch.empty(extend_attention.room_bytes(context, self._kv_heads, self._width), dtype=torch.uint8)
            kept += tables, packed
            given[at + _SEQUENCES], given[at + _CHUNK_BLOCKS] = tables.shape
            given[at + _CHUNK_TABLE], given[at + _CHUNK_STRIDE] = tables.data_ptr(), tables.stride(0)
            given[at + _STARTS], given[at + _CHUNK_LENGTHS] = chunks.starts.data_ptr(), chunks.lengths.data_ptr()
            given[at + _ROOM] = packed.data_ptr()
        _call(given, self._eps)
        return mixed.view(rows, -1, self._width)

    def _check(self, slots: Tensor, lengths: Tensor) -> None:
        if not all(0 <= slot < self._slots for slot in slots.tolist()):
            raise IndexError("a row's slot is none that the pool has")
        if min(lengths.tolist(), default=1) < 1:
            raise IndexError("a row's length leaves its own token out of the pool")


def _with_whole_rows(tables: Tensor) -> Tensor:
    return tables if tables.stride(1) == 1 else tables.contiguous()


def _place(given: array[int], x: Tensor, cos: Tensor, sin: Tensor, tables: Tensor, paged: PagedRows) -> None:
    given[_X], given[_COS], given[_SIN], given[_STRIDE] = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.stride(0)
    given[_SLOTS], given[_LENGTHS], given[_BATCH] = paged.slots.data_ptr(), paged.lengths.data_ptr(), len(paged.lengths)
    given[_TABLE], given[_MAX_BLOCKS], given[_TABLE_STRIDE] = tables.data_ptr(), tables.shape[1], tables.stride(0)


def _call(given: array[int], eps: float) -> None:
    answer = LIBRARY.call_with(given, eps)
    if answer == _OUTSIDE:
        raise IndexError("a row's table or its length name blocks that the pool or the table does not have")
    if answer == _NO_MEMORY:
        raise MemoryError("no memory for the parts of attention")


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
