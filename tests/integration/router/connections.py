"""A server of HTTP connections with a plain application, for tests of what a connection may do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tandem.router.api.servers import HttpServer, bind, port_of

PATIENCE_S = 60.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers with the length of the body once it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.has_begun.set()
        body = await Request(scope, receive).body()
        await self.may_answer.wait()
        await PlainTextResponse(str(len(body)))(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(app, listener)
    running = asyncio.create_task(server.run())
    async with asyncio.timeout(PATIENCE_S):
        await server.wait_started()
        yield port_of(listener)
        server.stop()
        await running


async def answer(streams: Streams) -> tuple[bytes, bytes]:
    """The status line and the body of an answer with a declared length."""
    reader = streams[0]
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head.split(b"\r\n")[0], await reader.readexactly(int(length.partition(b":")[2]))
