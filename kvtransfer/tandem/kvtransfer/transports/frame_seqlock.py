"""One word a frame under way, in a page that the sender writes and the receiver only reads: is the payload still its?

frame n, counted from 1, has word n mod MAX_FRAMES:   0 ──publish──▶ 2n + 1 ──clear──▶ 2n     it never comes back

The sender publishes when the payload is complete, and clears before its place in the ring can be given to another, or
when the transfer is given up. So a receiver that finds 2n + 1 after its last read has read frame n and nothing else.
"""

from __future__ import annotations

import mmap
import os
import struct

from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.sealed_memfd import check_sealed, make_sealed

MAX_FRAMES = 256
"""Frames that may wait for their reply, with and without payload."""
_WORD = struct.Struct("<Q")
PAGE_BYTES = MAX_FRAMES * _WORD.size


class FrameSeqlock:
    """The sender's end. Its caller sees to it that one thread at a time writes."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.descriptor = make_sealed("tandem-kv-words", PAGE_BYTES)
        try:
            self._page = mmap.mmap(self.descriptor, PAGE_BYTES, mmap.MAP_SHARED)
        except OSError:
            os.close(self.descriptor)
            raise
        self._words = memoryview(self._page).cast("Q")

    def publish(self, number: int) -> None:
        self._words[number % MAX_FRAMES] = 2 * number + 1

    def clear(self, number: int) -> None:
        """Clear the word, unless it belongs to a later frame already."""
        if self._words[number % MAX_FRAMES] == 2 * number + 1:
            self._words[number % MAX_FRAMES] = 2 * number

    def close_descriptor(self) -> None:
        """Close the descriptor after it was passed on; the page stays until `close`."""
        os.close(self.descriptor)

    def close(self) -> None:
        """Unmap the page once no thread writes: a mapping has its own descriptor, which would wait for the cycle
        collector."""
        self._words.release()
        self._page.close()


class FrameSeqlockView:
    """The receiver's end."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays the caller's. Raises LinkClosedError if it is no such page."""
        try:
            check_sealed(descriptor, PAGE_BYTES)
            page = mmap.mmap(descriptor, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise LinkClosedError(f"the page of words cannot be mapped: {error}") from error
        self._words = memoryview(page).cast("Q")

    def is_published(self, number: int) -> bool:
        """True if the place of frame `number` holds its payload and no other."""
        return self._words[number % MAX_FRAMES] == 2 * number + 1
