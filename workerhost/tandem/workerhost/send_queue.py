"""Messages that wait to be written to one stream, bounded: a stream that takes nothing is closed, not buffered."""

from __future__ import annotations

import asyncio
import logging

from tandem.core.logs import event

_log = logging.getLogger(__name__)
MAX_QUEUED, MAX_QUEUED_BYTES = 20_000, 32 << 20
"""The writer may hold as much again."""
PATIENCE_S = 0.01
"""How long a message that may wait is kept back, so that the next one takes it along."""


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
        """No more messages; `take` gives what is queued, and then nothing."""
        self._is_closed = True
        self._is_due.set()

    async def take(self) -> list[bytes]:
        """Everything that is queued, in order, once something is due; nothing = closed."""
        await self._is_due.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_closed:
            self._is_due.clear()
        queued, self._queued, self._bytes = self._queued, [], 0
        return queued
