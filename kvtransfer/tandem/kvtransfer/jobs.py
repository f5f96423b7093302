"""Jobs queued on a link, and their cutting into frames. Starts no thread: the iterating thread sends.

Every decision about a frame (may it still be read, does its transfer wait for it) is made here, under its transfer's
lock, one frame at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.core.ids import BlockId, GroupId, Rank, TransferId
from tandem.kvtransfer.device_payload import DeviceLink, DeviceRoom
from tandem.kvtransfer.frame import Checksum, FrameKind
from tandem.kvtransfer.head_routes import FrameSlice, HeadRoute, slices
from tandem.kvtransfer.kv_pool_access import PoolAccess, TokenRun, payload_bytes
from tandem.kvtransfer.outgoing_transfer import Outgoing
from tandem.kvtransfer.transports.base import Link, LinkClosedError
from tandem.kvtransfer.wire_codec import PayloadForm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks of one group and some of its layers, for the heads of one route."""

    outgoing: Outgoing
    group: GroupId
    pool: PoolAccess
    route: HeadRoute
    source: TokenRun
    dest_blocks: tuple[BlockId, ...]
    layers: range


@dataclass(frozen=True, slots=True)
class Control:
    """A frame without payload."""

    outgoing: Outgoing
    kind: FrameKind


class FrameWriter:
    """Writes jobs for one rank of a receiver into a link, for one thread.

    `on_broken` is called with a transfer and its failed source; that ends the transfer, not the link.
    """

    def __init__(self, dest_rank: Rank, *, on_broken: Callable[[Outgoing, str], None], clock: Clock) -> None:
        self._dest_rank, self._on_broken, self._clock = dest_rank, on_broken, clock
        self._reader = PayloadReader()
        self.bytes = 0
        """Payload written so far, over all transfers."""
        self.finished: TransferId | None = None
        """The last transfer with its end written."""

    def write(self, link: Link, job: Push | Control) -> Iterator[None]:
        """Send one job's frames, one an iteration; stops early when its transfer ends. Raises LinkClosedError."""
        if isinstance(job, Control):
            self._send_control(link, job)
            yield
            return
        try:
            form, size = job.outgoing.forms[job.group], link.max_payload_bytes
            for part in slices(form, job.source, job.dest_blocks, job.layers, job.route, size):
                if not self._send_slice(link, job, part):
                    return
                yield
        except LinkClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the pool is the caller's: its failure ends this transfer, not the link
            _log.exception("transfer_source_unreadable")
            self._on_broken(job.outgoing, f"the source could not be read: {error}")

    def _send_slice(self, link: Link, job: Push, part: FrameSlice) -> bool:
        """Gather and send one frame; False if the transfer has ended meanwhile."""
        outgoing = job.outgoing
        form = outgoing.forms[job.group]
        device = link if isinstance(link, DeviceLink) else None
        with _room(link, device, job, part) as room:
            with outgoing.lock:
                if not outgoing.can_move_bytes:
                    return False
                outgoing.begin()
                if device is not None:
                    outgoing.at_fence(device.withdraw)
                    device.claim(outgoing.ticket.transfer, outgoing.ticket.attempt)
                send_ns = int(self._clock.now_s() * 1e9)
                crc, kind = self._read(job, part, room)
                outgoing.bytes += part.payload_bytes
            frame = outgoing.frame(
                FrameKind.DATA, self._dest_rank,
                group=job.group, layers=part.layers, heads=part.dest_heads, blocks=part.dest_blocks,
                payload_bytes=part.payload_bytes, payload_crc=crc, send_ns=send_ns, codec=form.codec,
                checksum=kind,
            )  # fmt: skip
            if isinstance(room, memoryview):
                link.commit(frame, room)
            elif device is not None:
                device.commit_on_device(frame, room)
            self.bytes += part.payload_bytes
        return True

    def _read(self, job: Push, part: FrameSlice, room: memoryview | DeviceRoom) -> tuple[int, Checksum]:
        """Gather one frame's payload; its checksum. The transfer's lock is held."""
        form = job.outgoing.forms[job.group]
        if isinstance(room, memoryview):
            return self._reader.read(job.pool, form, part, room), Checksum.CRC32
        return room.gather(job.pool, part.source, part.layers, part.source_heads, form.spec.block_tokens)

    def _send_control(self, link: Link, job: Control) -> None:
        if job.kind is FrameKind.FINISH:
            with job.outgoing.lock:
                if not job.outgoing.can_move_bytes:
                    return
                job.outgoing.note_finish(self._dest_rank)
            self.finished = job.outgoing.ticket.transfer
        link.commit(job.outgoing.frame(job.kind, self._dest_rank), None)


class PayloadReader:
    """Reads a frame's payload out of a source pool, in its receiver's form. For one thread.

    Keeps the memory in which numbers wait to be converted.
    """

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


def _room(link: Link, device: DeviceLink | None, job: Push, part: FrameSlice) -> memoryview | DeviceRoom:
    """Reserve memory for the payload: on the device if link, pool and form allow it. Raises LinkClosedError."""
    if device is None or not job.outgoing.forms[job.group].is_written_as(job.pool.spec.dtype):
        return link.reserve(part.payload_bytes)
    return device.reserve_on_device(part.payload_bytes) if device.suits(job.pool) else link.reserve(part.payload_bytes)


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
