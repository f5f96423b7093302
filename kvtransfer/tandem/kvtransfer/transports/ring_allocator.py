"""Places payloads in a ring; each end of a link keeps its own copy. Positions are byte counts that only grow.

Both ends place the same payloads in the same order by the same rule, so only freed positions are sent: a payload never
wraps; one that does not fit before the end starts at 0 and the rest is skipped.
"""

from __future__ import annotations

import threading
from collections import deque

from tandem.kvtransfer.frame import MalformedFrameError
from tandem.kvtransfer.transports.base import LinkClosedError


class RingAccount:
    """Accounts for the taken part of `size` bytes. Not thread-safe; owns no memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.head = self.freed = 0

    def position_of(self, payload_bytes: int) -> int:
        """Position at which the next payload begins, free or not."""
        start = self.head % self.size
        return self.head if start + payload_bytes <= self.size else self.head + self.size - start

    def fits(self, payload_bytes: int) -> bool:
        return self.position_of(payload_bytes) + payload_bytes - self.freed <= self.size

    def take(self, payload_bytes: int) -> tuple[int, int]:
        """(offset, position of the end) of the next payload. Raises MalformedFrameError if there is no room."""
        if not self.fits(payload_bytes):
            raise MalformedFrameError(f"{payload_bytes} bytes more than the window of {self.size} allows")
        position = self.position_of(payload_bytes)
        self.head = position + payload_bytes
        return position % self.size, self.head

    def free(self, position: int) -> None:
        """Free everything before `position`, whatever the source of it: never less than before, never more than was
        handed out."""
        self.freed = max(self.freed, min(position, self.head))


class SendWindow:
    """A sender's account of the ring and of frames without a reply; a thread that needs more waits.

    One thread reserves and commits; another frees; any closes.
    """

    def __init__(self, size: int, max_frames: int) -> None:
        self._account = RingAccount(size)
        self._sent, self._max_frames = 0, max_frames
        self._unanswered: deque[int] = deque()  # for each frame, the position before which all is free with its reply
        self._changed = threading.Condition()
        self._is_closed = False
        self.stalls = 0

    def reserve(self, payload_bytes: int) -> int:
        """Offset of memory for a payload and its frame, once there is. Raises LinkClosedError."""
        with self._changed:
            self._wait(payload_bytes)
            return self._account.position_of(payload_bytes) % self._account.size

    def commit(self, payload_bytes: int) -> int:
        """Keep the reservation (a frame without payload has none and waits here); the frame's number, from 1.

        Raises LinkClosedError.
        """
        with self._changed:
            self._wait(payload_bytes)
            self._sent += 1
            self._unanswered.append(self._account.take(payload_bytes)[1])
            return self._sent

    def judged(self, frames: int) -> None:
        """Record that the receiver is done with the first `frames` of all that were sent."""
        with self._changed:
            while self._unanswered and self._sent - len(self._unanswered) < frames:
                self._account.free(self._unanswered.popleft())
            self._changed.notify_all()

    def close(self) -> None:
        """Let every wait raise from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wait(self, payload_bytes: int) -> None:
        if not self._is_closed and not self._has_room(payload_bytes):
            self.stalls += 1
            self._changed.wait_for(lambda: self._is_closed or self._has_room(payload_bytes))
        if self._is_closed:
            raise LinkClosedError("the link was closed")

    def _has_room(self, payload_bytes: int) -> bool:
        return len(self._unanswered) < self._max_frames and self._account.fits(payload_bytes)
