"""Limits of a connection's bytes and time before its client is authenticated."""

from __future__ import annotations

import asyncio
import contextlib

import orjson
import pytest

from tandem.router.api.http import protocol
from tests.integration.router.connections import App, answer, serving

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
