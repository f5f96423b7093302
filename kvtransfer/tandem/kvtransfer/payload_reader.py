"""Reads a frame's payload out of a source pool, in its receiver's form. Knows no transfer, no link."""

from __future__ import annotations

from tandem.kvtransfer.layout import FrameSlice
from tandem.kvtransfer.pool import PoolAccess, payload_bytes
from tandem.kvtransfer.wire_codec import PayloadForm


class PayloadReader:
    """Keeps the memory in which numbers wait to be converted; for one thread."""

    def __init__(self) -> None:
        self._scratch = bytearray()

    def read(self, pool: PoolAccess, form: PayloadForm, part: FrameSlice, out: memoryview) -> int:
        """Gather `part` into `out`, of `part.payload_bytes`; the CRC-32 of the payload. Errors are the pool's."""
        if form.is_written_as(pool.spec.dtype):
            return _gather(pool, form, part, out)
        heads = part.source_heads
        blocks = len(part.dest_blocks) * form.spec.block_tokens  # in blocks of one token
        size = payload_bytes(pool.spec, blocks, part.layers, heads) // pool.spec.block_tokens
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        numbers = memoryview(self._scratch)[:size]
        _gather(pool, form, part, numbers)
        if form.codec and part.source.tokens is not None:
            row_bytes = pool.spec.head_bytes() // pool.spec.block_tokens * form.spec.block_tokens
            _clear_from(part.source.tokens, numbers, form.spec.block_tokens, row_bytes, len(part.dest_blocks))
        return form.encode(numbers, pool.spec.dtype, out)


def _gather(pool: PoolAccess, form: PayloadForm, part: FrameSlice, out: memoryview) -> int:
    source, tokens = part.source, form.spec.block_tokens
    if source.block_tokens == tokens and not source.offset_tokens and len(source.blocks) == len(part.dest_blocks):
        return pool.read_into(source.blocks, part.layers, part.source_heads, out)
    return pool.read_tokens_into(source, part.layers, part.source_heads, out, target_tokens=tokens)


def _clear_from(tokens: int, numbers: memoryview, block_tokens: int, row_bytes: int, blocks: int) -> None:
    """Zero what follows the first `tokens` tokens of `numbers`, [blocks, layers, planes, heads, tokens, width].

    A codec's scale is that of a whole row: numbers that the block held before, maybe another tenant's, would decide how
    exactly the valid ones arrive.
    """
    if tokens >= blocks * block_tokens:
        return
    block_bytes = len(numbers) // blocks
    whole, valid = divmod(tokens, block_tokens)
    first = whole * block_bytes
    if valid:
        kept, end = row_bytes // block_tokens * valid, first + block_bytes
        for row in range(first, end, row_bytes):
            numbers[row + kept : row + row_bytes] = bytes(row_bytes - kept)
        first = end
    numbers[first:] = bytes(len(numbers) - first)
