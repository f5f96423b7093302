"""Test limits of connections, pipelining and the listen backlog."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from tandem.router.api import servers
from tandem.router.api.accept_queue_draining import let_nobody_in, queued
from tandem.router.api.http import protocol
from tandem.router.api.http.protocol import MAX_PIPELINED, PIPELINED_BYTES
from tandem.router.api.servers import HttpServer, bind, port_of, reserve
from tests.integration.router.connections import PATIENCE_S, App, answer, serving
from tests.plugins.costs import measured

ASKS = b"POST / HTTP/1.1\r\nhost: tandem\r\n"


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [
        (b"GET / HTTP/1.1\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 1000),
        (b"GET /", b"y" * 1000),
    ],
    ids=["lines", "one line", "the path"],
)
async def test_a_head_without_end_is_refused(begins: bytes, goes_on: bytes) -> None:
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


async def test_trailers_without_end_are_refused() -> None:
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


async def test_a_long_body_and_the_next_request_are_no_head() -> None:
    app = App()
    app.may_answer.set()
    async with serving(app) as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        for length in (3_000_000, 0, 1_000_000):
            streams[1].write(ASKS + b"content-length: %d\r\n\r\n" % length + b"z" * length)
            assert await answer(streams) == (b"HTTP/1.1 200 OK", str(length).encode())
        streams[1].close()


@pytest.mark.parametrize("said", [b"", b"G", ASKS, b"\r\n", ASKS + b"content-length: 0\r\n\r\n" + ASKS])
async def test_who_does_not_come_to_the_point_is_left_and_who_waits_for_an_answer_is_not(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.2)
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


GET = b"GET / HTTP/1.1\r\n\r\n"
POST = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n"


async def test_a_read_full_of_requests_costs_little_and_ends_the_connection() -> None:
    """14,221 of them took 31 MB and a third of a second in one callback."""
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


async def test_some_requests_may_wait_and_are_answered_in_order() -> None:
    app = App()
    async with serving(app) as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        streams[1].write(b"".join(POST % n + b"x" * n for n in range(1 + MAX_PIPELINED)))
        await app.has_begun.wait()
        app.may_answer.set()
        for n in range(1 + MAX_PIPELINED):
            assert await answer(streams) == (b"HTTP/1.1 200 OK", b"%d" % n)
        streams[1].close()


@pytest.mark.parametrize("behind", [GET * 8, POST % 100_000_000 + b"x" * 1000], ids=["requests", "a body"])
async def test_behind_an_answer_no_more_is_read_than_may_wait(behind: bytes) -> None:
    """Beyond that the connection ends, or nothing is taken from it."""
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


async def test_a_request_hears_that_its_client_left_though_another_one_came_behind_it() -> None:
    app = Streaming()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + GET)
        await reader.readuntil(b"begun")
        writer.transport.abort()
        await app.is_left.wait()
        assert app.count == 1


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


GET_ASKS = b"GET / HTTP/1.1\r\nhost: tandem\r\nconnection: close\r\n\r\n"
BACKLOG_PATIENCE_S = 20.0


def test_nobody_new_is_in_the_queue_and_who_is_in_it_is_heard() -> None:
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(reserve("127.0.0.1", 0))
        address = holder.getsockname()
        leaving, staying = (stack.enter_context(bind(*address, is_shared=True)) for _ in range(2))
        early = [stack.enter_context(_connected(address)) for _ in range(32)]
        waiting = queued(leaving)
        assert 0 < waiting < len(early), "the kernel spreads connections over the listeners"
        assert waiting + queued(staying) == len(early)
        assert let_nobody_in(leaving)
        late = [stack.enter_context(_connecting(address)) for _ in range(32)]
        assert queued(leaving) == waiting
        _answer_all(leaving)
        leaving.close()
        for each in late:  # clients that were not let in ask once more after a second
            each.settimeout(BACKLOG_PATIENCE_S)
            each.sendall(b"?")
        _answer_all(staying)
        assert [each.recv(1) for each in (*early, *late)] == [b"."] * 64


def _connected(address: Any) -> socket.socket:
    one = socket.create_connection(address, timeout=BACKLOG_PATIENCE_S)
    one.sendall(b"?")
    return one


def _connecting(address: Any) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(address)
    return one


def _answer_all(listener: socket.socket) -> None:
    while queued(listener):
        with listener.accept()[0] as accepted:
            assert accepted.recv(1) == b"?"
            accepted.sendall(b".")


@contextlib.asynccontextmanager
async def _serving() -> AsyncIterator[tuple[HttpServer, socket.socket]]:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(PlainTextResponse("heard"), listener)
    running = asyncio.create_task(server.run())
    async with asyncio.timeout(BACKLOG_PATIENCE_S):
        await server.wait_started()
        yield server, listener
        server.stop()
        await running


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(GET_ASKS)
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_connection_that_has_said_nothing_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNHEARD_S", 600.0)
    async with _serving() as (server, listener):
        streams = [await asyncio.open_connection("127.0.0.1", port_of(listener)) for _ in range(8)]
        last = asyncio.create_task(server.finish_requests())
        await asyncio.wait([last], timeout=0.5)
        assert not last.done(), "eight clients may still ask"
        for reader, writer in streams:
            assert (await _ask(reader, writer)).endswith(b"heard")
        await last


async def test_who_says_nothing_is_waited_for_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNHEARD_S", 0.3)
    async with _serving() as (server, listener):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
        await server.finish_requests()
        server.stop()
        assert await reader.read() == b""
        writer.close()
