"""Flow control of a link: the sender's window, and the receiver's account of the bytes it has taken.

A ring's positions are byte counts that only grow; each end of a link keeps its own copy. Both place the same payloads
in the same order by the same rule, so only freed positions are sent: a payload never wraps; one that does not fit
before the end starts at 0 and the rest is skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from tandem.kvtransfer.frame import Frame, FrameKind, FrameReply, MalformedFrameError, ReplyKind
from tandem.kvtransfer.transports.base import WINDOW_BYTES, LinkClosedError

REPORT_BYTES = WINDOW_BYTES // 2
"""Payload taken before a receiver reports it unasked; with the largest frame it must fit into WINDOW_BYTES."""


class SendGate:
    """Lets one thread of a sender wait for room until the link is closed. Others make room, any closes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what the subclass counts
        self._is_closed = False
        self.stalls = 0

    def close(self) -> None:
        """Let every wait raise from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _wait(self, has_room: Callable[[], bool]) -> None:
        """Wait for room, with the condition held. Raises LinkClosedError."""
        if not self._is_closed and not has_room():
            self.stalls += 1
            self._changed.wait_for(lambda: self._is_closed or has_room())
        self._check()

    def _check(self) -> None:
        if self._is_closed:
            raise LinkClosedError("the link was closed")


class SenderWindow(SendGate):
    """Payload bytes sent and not yet reported taken."""

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        super().__init__()
        self._size = size
        self._sent = self._taken = 0

    def wait_for(self, size: int) -> None:
        """Wait until `size` more bytes may be sent. Raises LinkClosedError."""
        with self._changed:
            self._wait(lambda: self._sent + size - self._taken <= self._size)

    def send(self, size: int) -> None:
        """Count `size` bytes as sent. Raises LinkClosedError."""
        with self._changed:
            self._check()
            self._sent += size

    def credit(self, taken: int) -> None:
        """The receiver has taken `taken` bytes since the link began."""
        with self._changed:
            self._taken = max(self._taken, min(taken, self._sent))
            self._changed.notify_all()


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
            raise MalformedFrameError(f"a payload of {payload_bytes} bytes exceeds the window of {self.size}")
        position = self.position_of(payload_bytes)
        self.head = position + payload_bytes
        return position % self.size, self.head

    def free(self, position: int) -> None:
        """Free everything before `position`, whatever the source of it: never less than before, never more than was
        handed out."""
        self.freed = max(self.freed, min(position, self.head))


class SendWindow(SendGate):
    """A sender's account of the ring and of frames without a reply: one thread reserves and commits."""

    def __init__(self, size: int, max_frames: int) -> None:
        super().__init__()
        self._account = RingAccount(size)
        self._sent, self._max_frames = 0, max_frames
        self._unanswered: deque[int] = deque()  # for each frame, the position before which all is free with its reply

    def reserve(self, payload_bytes: int) -> int:
        """Offset of memory for a payload and its frame, once there is. Raises LinkClosedError."""
        with self._changed:
            self._wait(lambda: self._has_room(payload_bytes))
            return self._account.position_of(payload_bytes) % self._account.size

    def commit(self, payload_bytes: int) -> int:
        """Keep the reservation (a frame without payload has none and waits here); the frame's number, from 1.

        Raises LinkClosedError.
        """
        with self._changed:
            self._wait(lambda: self._has_room(payload_bytes))
            self._sent += 1
            self._unanswered.append(self._account.take(payload_bytes)[1])
            return self._sent

    def judged(self, frames: int) -> None:
        """Record that the receiver is done with the first `frames` of all that were sent."""
        with self._changed:
            while self._unanswered and self._sent - len(self._unanswered) < frames:
                self._account.free(self._unanswered.popleft())
            self._changed.notify_all()

    def _has_room(self, payload_bytes: int) -> bool:
        return len(self._unanswered) < self._max_frames and self._account.fits(payload_bytes)


class ReceiverCredit:
    """Selects the replies to send: all but a mere ACK of a frame of a `patient` kind, which waits until `report_bytes`
    were taken."""

    def __init__(
        self, report_bytes: int = REPORT_BYTES, patient: Collection[FrameKind] = frozenset({FrameKind.DATA})
    ) -> None:
        self._report_bytes, self._patient = report_bytes, patient
        self._taken = self._reported = 0

    def settle(self, frame: Frame, reply: FrameReply, position: int | None = None) -> FrameReply | None:
        """Return the reply to send for `frame`, with the credit in it; None if it can wait.

        `position`: of its payload in a ring, of which everything up to the payload's end is free.
        """
        if frame.payload_bytes:
            self._taken = (self._taken if position is None else position) + frame.payload_bytes
        may_wait = reply.kind is ReplyKind.ACK and frame.kind in self._patient
        if may_wait and self._taken - self._reported < self._report_bytes:
            return None
        self._reported = self._taken
        return replace(reply, consumed=self._taken)
