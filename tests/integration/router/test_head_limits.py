"""What a connection may send, and how long it may take, before anybody knows who it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tandem.router.doors.http import protocol
from tandem.router.doors.servers import HttpServer, bind, port_of

PATIENCE_S = 60.0
ASKS = b"POST / HTTP/1.1\r\nhost: tandem\r\n"
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
    """The status line and the body of an answer that says how long it is."""
    reader = streams[0]
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head.split(b"\r\n")[0], await reader.readexactly(int(length.partition(b":")[2]))


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
        (b"GET /", b"y" * 1000),
    ],
    ids=["lines", "one line", "the path"],
)
def test_a_head_without_end_is_refused(begins: bytes, goes_on: bytes) -> None:
    async def run() -> None:
        async with serving(App()) as port:
            streams = await asyncio.open_connection("127.0.0.1", port)
            streams[1].write(begins)
            asked = asyncio.create_task(answer(streams))
            sent = 0
            while not asked.done() and sent < 64 << 20:
                streams[1].write(goes_on)
                sent += len(goes_on)
                with contextlib.suppress(ConnectionError):
                    await streams[1].drain()
                await asyncio.sleep(0)
            status, body = await asked
            assert status.startswith(b"HTTP/1.1 431 ")
            assert "headers are too long" in orjson.loads(body)["error"]["message"]
            assert sent < 64 << 20

    asyncio.run(run())


def test_trailers_without_end_are_refused() -> None:
    async def run() -> None:
        app = App()
        async with serving(app) as port:
            streams = await asyncio.open_connection("127.0.0.1", port)
            streams[1].write(ASKS + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
            await app.has_begun.wait()
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 64 << 20:
                    streams[1].write(b"x: " + b"y" * 1000 + b"\r\n")
                    sent += 1000
                    await streams[1].drain()
                    await asyncio.sleep(0)
            assert sent < 64 << 20

    asyncio.run(run())


def test_a_long_body_and_the_next_request_are_no_head() -> None:
    async def run() -> None:
        app = App()
        app.may_answer.set()
        async with serving(app) as port:
            streams = await asyncio.open_connection("127.0.0.1", port)
            for length in (3_000_000, 0, 1_000_000):
                streams[1].write(ASKS + b"content-length: %d\r\n\r\n" % length + b"z" * length)
                assert await answer(streams) == (b"HTTP/1.1 200 OK", str(length).encode())
            streams[1].close()

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", b"G", ASKS, b"\r\n", ASKS + b"content-length: 0\r\n\r\n" + ASKS])
def test_who_does_not_come_to_the_point_is_left_and_who_waits_for_an_answer_is_not(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)

    async def run() -> None:
        app = App()
        async with serving(app) as port:
            waiting = await asyncio.open_connection("127.0.0.1", port)
            waiting[1].write(ASKS + b"content-length: 1\r\n\r\n")
            await app.has_begun.wait()
            silent = await asyncio.open_connection("127.0.0.1", port)
            silent[1].write(said)
            if b"content-length" in said:
                app.may_answer.set()  # to its first request
            await silent[0].read()  # until it is closed
            waiting[1].write(b"z")
            app.may_answer.set()
            assert await answer(waiting) == (b"HTTP/1.1 200 OK", b"1")
            for streams in (waiting, silent):
                streams[1].close()

    asyncio.run(run())
