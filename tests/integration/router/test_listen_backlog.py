"""Leaving a listening socket: no client in its queue is reset, on a port of one listener or of several."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from tandem.router.api import servers
from tandem.router.api.listen_backlog import let_nobody_in, queued
from tandem.router.api.servers import HttpServer, bind, port_of, reserve

ASKS = b"GET / HTTP/1.1\r\nhost: tandem\r\nconnection: close\r\n\r\n"
PATIENCE_S = 20.0


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
            each.settimeout(PATIENCE_S)
            each.sendall(b"?")
        _answer_all(staying)
        assert [each.recv(1) for each in (*early, *late)] == [b"."] * 64


def _connected(address: Any) -> socket.socket:
    one = socket.create_connection(address, timeout=PATIENCE_S)
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
    async with asyncio.timeout(PATIENCE_S):
        await server.wait_started()
        yield server, listener
        server.stop()
        await running


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(ASKS)
    answer = await reader.read()
    writer.close()
    return answer


def test_a_connection_that_has_said_nothing_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNHEARD_S", 600.0)

    async def run() -> None:
        async with _serving() as (server, listener):
            streams = [await asyncio.open_connection("127.0.0.1", port_of(listener)) for _ in range(8)]
            last = asyncio.create_task(server.finish_requests())
            await asyncio.wait([last], timeout=0.5)
            assert not last.done(), "eight clients may still ask"
            for reader, writer in streams:
                assert (await _ask(reader, writer)).endswith(b"heard")
            await last

    asyncio.run(run())


def test_who_says_nothing_is_waited_for_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "UNHEARD_S", 0.3)

    async def run() -> None:
        async with _serving() as (server, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(listener))
            await server.finish_requests()
            server.stop()
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())
