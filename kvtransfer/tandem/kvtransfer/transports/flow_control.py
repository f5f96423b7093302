"""Flow control of a link: the sender's window, and the receiver's account of the bytes it has taken."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import replace

from tandem.kvtransfer.frame import Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.transports.base import WINDOW_BYTES, LinkClosedError
from tandem.kvtransfer.transports.payload_ring import largest_payload

REPORT_BYTES = WINDOW_BYTES // 2
"""Payload taken before a receiver reports it unasked; with the largest frame it must fit into WINDOW_BYTES."""


class SenderWindow:
    """Payload bytes sent and not yet reported taken. One thread waits and sends; others credit and close."""

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._sent = self._taken = 0
        self._is_closed = False
        self.stalls = 0

    def wait_for(self, size: int) -> None:
        """Wait until `size` more bytes may be sent. Raises LinkClosedError."""
        with self._changed:
            if not self._is_closed and self._sent + size - self._taken > self._size:
                self.stalls += 1
                self._changed.wait_for(lambda: self._is_closed or self._sent + size - self._taken <= self._size)
            self._check()

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

    def close(self) -> None:
        """Let the others raise from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._is_closed:
            raise LinkClosedError("the link was closed")


class ReceiverCredit:
    """Selects the replies to send: all but a mere ACK of a frame of a `patient` kind, which waits until `report_bytes`
    were taken."""

    def __init__(
        self, report_bytes: int = REPORT_BYTES, patient: Collection[FrameKind] = frozenset({FrameKind.DATA})
    ) -> None:
        self._report_bytes, self._patient = report_bytes, patient
        self._taken = self._reported = 0

    def settle(self, frame: Frame, reply: FrameReply) -> FrameReply | None:
        """Return the reply to send for `frame`, with the credit in it; None if it can wait."""
        self._taken += frame.payload_bytes
        may_wait = reply.kind is ReplyKind.ACK and frame.kind in self._patient
        if may_wait and self._taken - self._reported < self._report_bytes:
            return None
        self._reported = self._taken
        return replace(reply, consumed=self._taken)


class RingCredit:
    """Tracks the freed position of a shared ring, and when the sender must be notified.

    The largest payload, the bytes skipped before it at the ring's end, and the unreported ones fit into the ring
    together: a sender that waits for memory is always notified.
    """

    def __init__(self, ring_bytes: int) -> None:
        self._untold_bytes = ring_bytes - 2 * largest_payload(ring_bytes)
        self._freed = self._told = 0

    def settle(self, frame: Frame, position: int, reply: FrameReply) -> FrameReply | None:
        """Return the reply to send for a frame with a payload at `position`; None if it can wait."""
        if frame.payload_bytes:
            self._freed = position + frame.payload_bytes
        is_mere_ack = reply.kind is ReplyKind.ACK and frame.kind in (FrameKind.DATA, FrameKind.OPEN)
        if is_mere_ack and self._freed - self._told < self._untold_bytes:
            return None
        self._told = self._freed
        return replace(reply, consumed=self._freed)
