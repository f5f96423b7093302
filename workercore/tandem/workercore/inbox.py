"""Inbox of the step loop: messages from the host's ring and events posted by transport threads wake it, on one poll."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from tandem.core.logs import event
from tandem.rpc.v1 import engine_pb2 as e
from tandem.workercore.message_ring import RingReader

_log = logging.getLogger(__name__)


class Mail(Protocol):
    """Source of the step loop's input."""

    def take(self, wait_s: float) -> list[object]:
        """Take everything that is here, events first; waits up to `wait_s` for something (0 = do not wait)."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """`post` may be called from any thread; everything else belongs to the step loop."""

    ring: RingReader
    posted: deque[object]
    wake: int

    @classmethod
    def open(cls, ring: RingReader) -> Inbox:
        return cls(ring, deque(), os.eventfd(0, os.EFD_NONBLOCK))

    def post(self, event: object) -> None:
        """Hand over an event from another thread and wake the loop."""
        self.posted.append(event)
        os.eventfd_write(self.wake, 1)

    def take(self, wait_s: float) -> list[object]:
        """Take everything that is here, events first; waits up to `wait_s` for something (0 = do not wait)."""
        if not self.posted and wait_s > 0:
            select.select([self.ring.filled, self.wake], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        items: list[object] = []
        while self.posted:
            items.append(self.posted.popleft())
        for data in self.ring.read_all():
            try:
                items.append(e.HostToRank.FromString(data))
            except DecodeError:  # the host has parsed it; but it is nested deeper here than there
                event(_log, "message cannot be read", logging.WARNING, bytes=len(data))
        return items

    def close(self) -> None:
        self.ring.close()
        os.close(self.wake)
