"""A ring of shared memory, created and owned by the receiver, filled by the sender. Positions are growing byte counts.

position % size:  0        freed            head        size
                  │ free   │ under way      │ free      │ word │   a payload never wraps: what does not fit before
                                                                   the end starts at 0 and the rest is skipped

The word, in a page of its own behind the ring, is `freed` as the receiver knows it: a sender that is short of memory
reads it before it waits for a reply. It wakes no thread, and nothing depends on it: replies carry the same later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

from tandem.kvtransfer.frame import FrameKind, MalformedFrameError
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.flow_control import ReceiverCredit, RingAccount, SendGate
from tandem.kvtransfer.transports.sealed_memfd import is_sealed, make_sealed

MAX_RING_PAYLOAD_BYTES = 2 << 20
"""More than elsewhere: it lies in the ring, so that no memory is taken for it, and fewer frames cost less."""
RING_BYTES = 8 << 20
MAX_RING_BYTES = 256 << 20
"""A sender maps no larger one: its pages are the sender's, too, from the moment of the mapping."""
_WORD_BYTES = mmap.PAGESIZE


def largest_payload(ring_bytes: int) -> int:
    """A frame's payload in a ring of this size: half of it at most, for up to as much is skipped before it."""
    return min(MAX_RING_PAYLOAD_BYTES, ring_bytes // 2)


def ring_credit(ring_bytes: int) -> ReceiverCredit:
    """Report a shared ring's freed position before its sender would wait for it.

    The largest payload, the bytes skipped before it at the ring's end, and the unreported ones fit into the ring
    together: a sender that waits for memory is always notified.
    """
    return ReceiverCredit(ring_bytes - 2 * largest_payload(ring_bytes), {FrameKind.DATA, FrameKind.OPEN})


class ReceiverRing:
    """The receiver's mapping. `view` hands out memory that the sender has reported as filled."""

    def __init__(self, size: int) -> None:
        self.descriptor = make_sealed("tandem-kv", size + _WORD_BYTES)
        try:
            self._map = _map(self.descriptor, size + _WORD_BYTES)
        except OSError:
            os.close(self.descriptor)
            raise
        self._view, self._word, self._size = *_parts(self._map, size), size
        self._order = threading.Lock()

    def close_descriptor(self) -> None:
        """Close the descriptor after it was passed on."""
        os.close(self.descriptor)

    def view(self, position: int, size: int) -> memoryview:
        """The payload at `position`; raises MalformedFrameError if it does not lie inside."""
        start = position % self._size
        if start + size > self._size:
            raise MalformedFrameError(f"a payload of {size} bytes at {start} of a ring of {self._size}")
        return self._view[start : start + size]

    def note_freed(self, position: int) -> None:
        """Publish to the sender that everything before `position` was read.

        The store is one of 8 aligned bytes. x86 keeps it behind the reads before it; elsewhere the lock does, which is
        taken after other locks were given back.
        """
        with self._order:
            self._word[0] = position

    def close(self) -> None:
        _unmap(self._map, self._word, self._view)


class SenderRing(SendGate):
    """The sender's mapping and its account of what is free. One thread reserves; another frees; any closes."""

    def __init__(self, descriptor: int) -> None:
        """Takes the descriptor over. Raises LinkClosedError if it is no ring of a sensible size."""
        super().__init__()
        try:
            size = os.fstat(descriptor).st_size - _WORD_BYTES
            if not mmap.PAGESIZE <= size <= MAX_RING_BYTES or not is_sealed(descriptor):
                raise LinkClosedError(f"the receiver passed a ring of {size} bytes, or an unsealed one")
            self._map = _map(descriptor, size + _WORD_BYTES)
        finally:
            os.close(descriptor)
        self._view, self._word, self.size = *_parts(self._map, size), size
        self._account, self._reserved = RingAccount(self.size), 0

    def reserve(self, size: int) -> memoryview:
        """Reserve `size` bytes, at most half the ring; waits until they are free. Raises LinkClosedError."""
        account = self._account
        self._reserved = account.position_of(size)  # this thread alone moves it on
        past = self._reserved + size - self.size
        with self._changed:
            if account.freed < past:
                account.free(self._word[0])
            self._wait(lambda: account.freed >= past)
        start = self._reserved % self.size
        return self._view[start : start + size]

    def commit(self, size: int) -> int:
        """Keep the reservation's `size` bytes; their position."""
        self._account.head = self._reserved + size
        return self._reserved

    def free(self, position: int) -> None:
        """Free everything before `position`, with which the receiver is done."""
        with self._changed:
            self._account.free(position)
            self._changed.notify_all()

    def release(self) -> None:
        """Give the mapping back; called when no thread uses the ring any more."""
        _unmap(self._map, self._word, self._view)


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _parts(mapping: mmap.mmap, size: int) -> tuple[memoryview, memoryview]:
    """The ring of `size` bytes, and the word behind it."""
    whole = memoryview(mapping)
    return whole[:size], whole[size : size + 8].cast("Q")


def _unmap(mapping: mmap.mmap, *views: memoryview) -> None:
    with contextlib.suppress(BufferError):  # a slice is still held somewhere: the last one to go unmaps
        for view in views:
            view.release()
        mapping.close()
