"""Bounded queue of messages to one stream: a stream that takes nothing is closed, not buffered."""

from __future__ import annotations

import asyncio
import logging

from tandem.core.logs import event

_log = logging.getLogger(__name__)
MAX_QUEUED, MAX_QUEUED_BYTES = 20_000, 32 << 20
"""The writer may hold as much again."""
PATIENCE_S = 0.01
"""Time for which a message that may wait is kept back, so that it is sent with the next one."""


class OutQueue:
    """Filled by the event loop, drained by one writer. `reader`: the reader of the stream, for the log."""

    def __init__(self, reader: str = "") -> None:
        self._reader = reader
        self._queued: list[bytes] = []
        self._bytes = 0
        self._is_due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def put(self, message: bytes, *, may_wait: bool = False) -> bool:
        """Queue a message; False if the stream is closed, or its reader is stuck (then it is closed now).

        One that `may_wait` is due with the next one that may not, after PATIENCE_S at the latest.
        """
        if self._is_closed:
            return False
        if len(self._queued) >= MAX_QUEUED or self._bytes >= MAX_QUEUED_BYTES:
            event(_log, "stream does not drain", logging.WARNING, reader=self._reader)
            self.close()
            return False
        self._queued.append(message)
        self._bytes += len(message)
        if not may_wait:
            self._is_due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._is_due.set)
        return True

    def close(self) -> None:
        """Close it: `take` gives the queued messages, and then nothing."""
        self._is_closed = True
        self._is_due.set()

    async def take(self) -> list[bytes]:
        """Take everything that is queued, in order, once something is due; nothing = closed."""
        await self._is_due.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_closed:
            self._is_due.clear()
        queued, self._queued, self._bytes = self._queued, [], 0
        return queued
