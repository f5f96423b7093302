"""Requests sent behind an unanswered request are bounded, in number and in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from starlette.requests import Request

from tandem.router.api.http.protocol import MAX_PIPELINED, PIPELINED_BYTES
from tests.integration.router.connections import PATIENCE_S, App, answer, serving
from tests.plugins.costs import measured

GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n"


def test_a_read_full_of_requests_costs_little_and_ends_the_connection() -> None:
    """14,221 of them took 31 MB and a third of a second in one callback."""

    async def run() -> None:
        app = App()
        app.may_answer.set()
        async with serving(app) as port:
            flood = GET * (256_000 // len(GET))
            with measured(asyncio.get_running_loop()) as cost:
                for _ in range(10):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(flood)
                    with contextlib.suppress(ConnectionError):
                        await reader.read(-1)  # until it is closed
                    writer.close()
            cost.check_refusal(len(flood))

    asyncio.run(run())


def test_some_requests_may_wait_and_are_answered_in_order() -> None:
    async def run() -> None:
        app = App()
        async with serving(app) as port:
            streams = await asyncio.open_connection("127.0.0.1", port)
            streams[1].write(b"".join(POST % n + b"x" * n for n in range(1 + MAX_PIPELINED)))
            await app.has_begun.wait()
            app.may_answer.set()
            for n in range(1 + MAX_PIPELINED):
                assert await answer(streams) == (b"HTTP/1.1 200 OK", b"%d" % n)
            streams[1].close()

    asyncio.run(run())


@pytest.mark.parametrize("behind", [GET * 8, POST % 100_000_000 + b"x" * 1000], ids=["requests", "a body"])
def test_behind_an_answer_no_more_is_read_than_may_wait(behind: bytes) -> None:
    """Beyond that the connection ends, or nothing is taken from it."""

    async def run() -> None:
        app = Streaming()
        loop = asyncio.get_running_loop()
        async with serving(app) as port:
            with socket.create_connection(("127.0.0.1", port)) as client, measured(loop) as cost:
                client.setblocking(False)
                await loop.sock_sendall(client, GET)
                await app.has_begun.wait()
                sent, goes_on = 0, behind if behind.startswith(b"GET") else b"x" * 1000
                await loop.sock_sendall(client, behind)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    while sent < 64 << 20:
                        async with asyncio.timeout(1.0):
                            await loop.sock_sendall(client, goes_on)
                        sent += len(goes_on)
                        await asyncio.sleep(0)
            assert sent < 64 << 20  # buffers of the sockets among them
            cost.check_refusal(PIPELINED_BYTES)
            assert app.count == 1
            for task in app.tasks:
                task.cancel()

    asyncio.run(run())


def test_a_request_hears_that_its_client_left_though_another_one_came_behind_it() -> None:
    async def run() -> None:
        app = Streaming()
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET + GET)
            await reader.readuntil(b"begun")
            writer.transport.abort()
            await app.is_left.wait()
            assert app.count == 1

    asyncio.run(run())


class Streaming(App):
    """Begins to answer, and goes on until its client leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.is_left = asyncio.Event()
        self.count = 0
        self.tasks: list[asyncio.Task[Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.count += 1
        self.tasks += [task for task in (asyncio.current_task(),) if task is not None]
        self.has_begun.set()
        await Request(scope, receive).body()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000000")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        async with asyncio.timeout(PATIENCE_S):
            while (await receive())["type"] != "http.disconnect":
                await send({"type": "http.response.body", "body": b".", "more_body": True})
        self.is_left.set()
