"""Loads for a whole cluster: streaming completions over plain sockets, timed token by token. Not a benchmark itself.

An HTTP library costs more per chunk than the tiny model takes to make it, on the same two cores; so the response is
read line by line as it comes. Chunked framing lines are hexadecimal and cannot be taken for `data:` lines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

TIMING = b": tandem-timing "
DONE = b"data: [DONE]"
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Answer:
    """When each token came (monotonic seconds). `due_s` is when it should have been sent, so that late sending counts
    as waiting. One event is one token, but for the rare ones that wait for the rest of a character."""

    due_s: float
    token_s: list[float] = field(default_factory=list)
    timing: dict[str, Any] | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def second_s(self) -> float:
        return self.token_s[1] - self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies after the second token."""
        return [b - a for a, b in zip(self.token_s[1:], self.token_s[2:], strict=False)]


async def complete(
    host: str, port: int, body: dict[str, Any], due_s: float, timeout_s: float, headers: Mapping[str, str] = _NONE
) -> Answer:
    """POST /v1/completions with stream; never raises, an error is part of the answer."""
    answer = Answer(due_s)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
            try:
                await _talk(reader, writer, body, answer, headers)
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    body: dict[str, Any],
    answer: Answer,
    headers: Mapping[str, str],
) -> None:
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"X-Tandem-Timing: 1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        answer.error = f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')[-400:]}"
        return
    is_done = False
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            if line.startswith(b'data: {"error"'):
                answer.error = line.decode().strip()
            else:
                answer.token_s.append(time.monotonic())
        elif line.startswith(TIMING):
            answer.timing = json.loads(line[len(TIMING) :])
        elif line.startswith(DONE):
            is_done = True
    if not is_done and not answer.error:
        answer.error = "the stream ended without [DONE]"


def body_of(prompt: Sequence[int], tokens: int, model: str = "tandem-tiny", **more: Any) -> dict[str, Any]:
    """A greedy streamed completion of that many tokens."""
    fixed = {"ignore_eos": True, "temperature": 0, "stream": True}
    return {"model": model, "prompt": list(prompt), "max_tokens": tokens, **fixed, **more}


async def ask(
    api: str, body: dict[str, Any], due_s: float, timeout_s: float, headers: Mapping[str, str] = _NONE
) -> Answer:
    """`complete` at the API's URL."""
    url = urlsplit(api)
    return await complete(str(url.hostname), int(url.port or 0), body, due_s, timeout_s, headers)


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is sent `at_s` seconds after the start, whatever became of those before."""

    at_s: float
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


async def offer(api: str, plan: Sequence[Due], timeout_s: float) -> list[Answer]:
    """Send every request when it is due; their answers, in the order of the plan."""
    start_s = time.monotonic() + 0.1

    async def one(due: Due) -> Answer:
        await asyncio.sleep(max(0.0, start_s + due.at_s - time.monotonic()))
        return await ask(api, due.body, start_s + due.at_s, timeout_s, due.headers)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(due)) for due in plan]
    return [task.result() for task in tasks]


def check_served(answers: Sequence[Answer], allowed: str = "") -> None:
    """SystemExit if a request failed, but for errors with these words."""
    failed = [answer.error for answer in answers if answer.error and not (allowed and allowed in answer.error)]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}")
