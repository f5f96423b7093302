"""Messages that wait to be written to one stream, bounded: a stream that takes nothing is closed, not buffered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Out = TypeVar("Out")
MAX_QUEUED = 20_000


class OutQueue(Generic[Out]):
    """Filled by the event loop, drained by one writer."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Out | None] = asyncio.Queue(MAX_QUEUED + 1)
        self._is_closed = False

    def put(self, message: Out) -> bool:
        """Queue a message; False if the stream is closed, or its reader is stuck (then it is closed now)."""
        if self._is_closed:
            return False
        if self._queue.qsize() >= MAX_QUEUED:
            self.close()
            return False
        self._queue.put_nowait(message)
        return True

    def close(self) -> None:
        """No more messages; iteration ends after what is queued."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Out]:
        while (message := await self._queue.get()) is not None:
            yield message
