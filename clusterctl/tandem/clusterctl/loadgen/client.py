"""Streaming completions over plain sockets, timed token by token.

An HTTP library costs more per chunk than a tiny model takes to make it, on the same cores; so the response is read line
by line as it arrives, and parsed at its end. Chunked framing lines are hexadecimal and cannot be taken for
`data:` lines.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from tandem.core.errors import ConfigError

TIMING = b": tandem-timing "
DONE = b"data: [DONE]"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_NONE: Mapping[str, str] = MappingProxyType({})
_FORM = "Write it like http://10.0.0.7:8000"
_MAX_ERROR_BYTES = 64 * 1024
_LEAD_S = 0.1
"""Before the first request: time to make the tasks."""


@dataclass(slots=True)
class TimedAnswer:
    """The arrival time of each token (monotonic seconds). `due_s` is when it should have been sent, so that late
    sending counts as waiting. One event is one token, but for the rare ones that wait for the rest of a character."""

    due_s: float
    token_s: list[float] = field(default_factory=list)
    timing: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    """The server's token counts, if it reports them."""
    error: str = ""
    sent_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.due_s

    @property
    def second_s(self) -> float:
        return self.token_s[1] - self.token_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Return inter-token latencies after the second token."""
        return [b - a for a, b in zip(self.token_s[1:], self.token_s[2:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Destination of requests. `is_strict`: events without any text or token are no tokens, which requires parsing
    each.
    `tls`: built once, since that takes milliseconds, which would count into some request's time to first token."""

    host: str
    port: int
    path: str = COMPLETIONS
    tls: ssl.SSLContext | None = None
    is_strict: bool = False

    @classmethod
    def of(cls, url: str, path: str = COMPLETIONS, *, is_strict: bool = False) -> Target:
        """Parse an API's URL, with or without /v1; ConfigError if it is none."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL", why=str(error), todo=_FORM) from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url!r} is not the URL of an API", todo=_FORM)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host=host, port=port or (443 if tls else 80), path=prefix + path, tls=tls, is_strict=is_strict)


async def complete(
    target: Target, body: dict[str, Any], due_s: float, timeout_s: float, headers: Mapping[str, str] = _NONE
) -> TimedAnswer:
    """POST with stream; never raises, an error is part of the answer."""
    answer = TimedAnswer(due_s)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 20, ssl=target.tls)
            try:
                answer.sent_s = time.monotonic()
                await _talk(reader, writer, target, body, answer, headers)
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    target: Target,
    body: dict[str, Any],
    answer: TimedAnswer,
    headers: Mapping[str, str],
) -> None:
    data = json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nContent-Type: application/json\r\n"
        f"X-Tandem-Timing: 1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        answer.error = f"{status.decode().strip()}: {_reason(await _rest(reader))}"
        return
    is_done = False
    lines: list[bytes] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            if line.startswith(b'data: {"error"'):
                answer.error = line.decode().strip()
            else:
                answer.token_s.append(time.monotonic())
                if target.is_strict:
                    lines.append(line)
        elif line.startswith(TIMING):
            answer.timing = json.loads(line[len(TIMING) :])
        elif line.startswith(DONE):
            is_done = True
    if target.is_strict:
        _look_into(answer, lines)
    if not is_done and not answer.error:
        answer.error = "the stream ended without [DONE]"


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, at most 64 KiB."""
    parts = bytearray()
    while len(parts) < _MAX_ERROR_BYTES and (part := await reader.read(4096)):
        parts += part
    return bytes(parts)


def _reason(rest: bytes) -> str:
    """Return the message of an error, without the headers before it, which differ from one to the next."""
    body = (b"\r\n" + rest).partition(b"\r\n\r\n")[2]
    try:
        found = json.loads(body)["error"]
        return f"{found.get('code') or ''} {found['message']}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(body.decode(errors="replace").split())[-400:]


def _look_into(answer: TimedAnswer, lines: Sequence[bytes]) -> None:
    """Keep the times of events that carry readable text, and the usage."""
    times = answer.token_s
    answer.token_s = []
    for at_s, line in zip(times, lines, strict=True):
        event = json.loads(line[len(b"data: ") :])
        answer.usage = event.get("usage") or answer.usage
        if any(
            choice.get("text") or (choice.get("delta") or {}).get("content") for choice in event.get("choices") or []
        ):
            answer.token_s.append(at_s)


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is sent `at_s` seconds after the start, independent of the outcome of earlier ones."""

    at_s: float
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


async def send_all(
    target: Target, plan: Sequence[Due], timeout_s: float, on_end: Callable[[TimedAnswer], object] = lambda answer: None
) -> list[TimedAnswer]:
    """Send every request when it is due; return their answers in the order of the plan. `on_end` gets each as it
    ends."""
    start_s = time.monotonic() + _LEAD_S

    async def one(due: Due) -> TimedAnswer:
        await asyncio.sleep(max(0.0, start_s + due.at_s - time.monotonic()))
        answer = await complete(target, due.body, start_s + due.at_s, timeout_s, due.headers)
        on_end(answer)
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(due)) for due in plan]
    return [task.result() for task in tasks]
