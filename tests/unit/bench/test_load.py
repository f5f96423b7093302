"""The open-loop sender: the requests that it sends, and its evaluation of the answers."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.load import Due, TimedAnswer, body_of, check_served, offer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with as many tokens as are asked for; a request marked as greedy gets a 503."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(length))
    if b"X-Greedy" in head:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\nlater")
    else:
        writer.write(HEAD + b'data: {"choices": []}\n\n' * body["max_tokens"])
        writer.write(b': tandem-timing {"cached_tokens": 4}\n\ndata: [DONE]\n\n')
    writer.close()


def test_answers_come_in_the_order_of_the_plan() -> None:
    plan = [
        Due(0.02, body_of([1, 2], 3)),
        Due(0.0, body_of([1], 1), {"X-Greedy": "1"}),
        Due(0.01, body_of([1], 5)),
    ]

    async def run() -> list[TimedAnswer]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await offer(f"http://127.0.0.1:{port}", plan, 60.0)

    first, greedy, last = asyncio.run(run())
    assert (len(first.token_s), first.timing, first.error) == (3, {"cached_tokens": 4}, "")
    assert len(last.token_s) == 5
    assert first.due_s - greedy.due_s == pytest.approx(0.02)
    assert " 503 " in greedy.error
    check_served([first, last])
    check_served([first, greedy], allowed=" 503 ")
    with pytest.raises(SystemExit, match=r"1 of 3 requests failed, the first with: .* 503 "):
        check_served([first, greedy, last])
