"""A stream that this end closes is over, also if a message arrives at that moment."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.workerhost.send_queue import OutQueue
from tandem.workerhost.streams import CLOSED, run_stream


class Wire:
    """Both ends of a stream, in memory."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[str] = asyncio.Queue()
        self.written: list[bytes] = []

    def __aiter__(self) -> Wire:
        return self

    async def __anext__(self) -> str:
        return await self.incoming.get()

    async def write(self, message: bytes) -> None:
        self.written.append(message)


async def closed_as_a_message_comes(turns: int) -> tuple[str, list[Any]]:
    wire, queue = Wire(), OutQueue()
    heard: list[Any] = []
    stream = asyncio.create_task(run_stream(wire, heard.append, queue, wire))
    queue.put(b"said")
    while not wire.written:
        await asyncio.sleep(0)
    queue.close()
    for _ in range(turns):
        await asyncio.sleep(0)
    wire.incoming.put_nowait("ping")
    async with asyncio.timeout(2):  # less than it takes to call the other end silent
        return await stream, heard


def test_a_closed_stream_ends_whatever_comes() -> None:
    for turns in range(8):
        why, heard = asyncio.run(closed_as_a_message_comes(turns))
        assert why == CLOSED
        assert heard in ([], ["ping"])
