"""An open-loop HTTP load from one thread over raw sockets: it counts events and times them, and decodes nothing.

An HTTP library costs more per chunk than the router does. Connections are kept alive and used again, as clients do.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_HEAD = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: OpenAI/Python 1.99.9\r\nAccept: application/json\r\n"
    "Accept-Encoding: identity\r\nAuthorization: Bearer none\r\nX-Stainless-Lang: python\r\n"
    "X-Stainless-Runtime: CPython\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
_ID = re.compile(rb'"id":"([^"]+)"')
_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_SO_TIMESTAMPNS = 35
"""Linux's; Python does not name it."""
_TIMESPEC = struct.Struct("@qq")
_ABOUT_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)
_FULL = (b"HTTP/1.1 429 ", b"HTTP/1.1 503 ")
_EVENT, _END, _TAIL_BYTES = b"data: ", b"0\r\n\r\n", 1024


@dataclass(slots=True)
class Due:
    """A request that is sent `at_s` seconds after the start, independent of those before."""

    at_s: float
    kind: str
    data: bytes
    tokens: int


@dataclass(slots=True)
class Answer:
    """Result of one request: monotonic seconds, `sent_s` of the first byte, `first_s` of the first event with text and
    `last_s` of the last byte as the kernel took them: the delay until this process reads them is not the router's."""

    kind: str
    due_s: float
    sent_s: float
    id: str = ""
    first_s: float = 0.0
    last_s: float = 0.0
    events: int = 0
    is_refused: bool = False
    """It was rejected, to be retried later."""


@dataclass(slots=True)
class _Stream:
    sock: socket.socket
    due: Due
    answer: Answer
    tail: bytes = b""


@dataclass(slots=True)
class Load:
    """Sends what is due to `port` and reads what comes; `run` returns when every answer is complete."""

    port: int
    timeout_s: float = 30.0
    may_refuse: bool = False
    """True if it may be rejected for lack of room."""
    _idle: list[socket.socket] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.EpollSelector)
    _wall_offset_s: float = field(default_factory=lambda: time.time() - time.monotonic())

    def run(self, plan: Sequence[Due], marks: Sequence[tuple[float, Callable[[], None]]] = ()) -> list[Answer]:
        """Answers by when they ended; calls every mark so many seconds after the start.

        Raises SystemExit for an answer that is neither a complete 200 with all its tokens nor, with `may_refuse`, a
        refusal.
        """
        left = sorted(marks, key=lambda mark: -mark[0])
        answers: list[Answer] = []
        pending, open_streams = list(reversed(plan)), 0
        start_s = time.monotonic() + 0.01
        ends_s = start_s + plan[-1].at_s + self.timeout_s
        while pending or open_streams:
            now_s = time.monotonic()
            while pending and start_s + pending[-1].at_s <= now_s:
                due = pending.pop()
                self._send(due, start_s + due.at_s)
                open_streams += 1
            while left and start_s + left[-1][0] <= now_s:
                left.pop()[1]()
            wait_s = start_s + pending[-1].at_s - time.monotonic() if pending else 1.0
            for key, _ in self._selector.select(max(0.0, wait_s)):
                ended = self._read(key.data)
                if ended is not None:
                    answers.append(ended)
                    open_streams -= 1
            if now_s > ends_s:
                raise SystemExit(f"{open_streams} answers did not end within {self.timeout_s:g} s")
        return answers

    def close(self) -> None:
        for sock in self._idle:
            sock.close()
        self._idle.clear()
        self._selector.close()

    def _send(self, due: Due, due_s: float) -> None:
        sock = self._idle.pop() if self._idle else self._connect()
        stream = _Stream(sock, due, Answer(due.kind, due_s, time.monotonic()))
        self._selector.register(sock, selectors.EVENT_READ, stream)
        sock.setblocking(True)  # 40 KB at most go into the socket's buffer
        sock.sendall(due.data)
        sock.setblocking(False)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        return sock

    def _came_s(self, about: Sequence[tuple[int, int, bytes]]) -> float:
        """When the kernel got the last bytes that were read, on the monotonic clock."""
        now_s = time.monotonic()
        for _, kind, data in about:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(data)
                return min(now_s, float(seconds + nanoseconds / 1e9 - self._wall_offset_s))
        return now_s

    def _read(self, stream: _Stream) -> Answer | None:
        """The answer, once it is complete."""
        data, about, _, _ = stream.sock.recvmsg(1 << 18, _ABOUT_BYTES)
        answer, now_s = stream.answer, self._came_s(about)
        if not data:
            raise SystemExit(f"the router closed a connection after {stream.tail!r}")
        if not answer.id:
            data = stream.tail + data
            stream.tail = b""
            if b"\r\n\r\n" not in data:
                stream.tail = data
                return None
            if self.may_refuse and data.startswith(_FULL):
                answer.is_refused, answer.last_s = True, now_s
                self._selector.unregister(stream.sock)
                stream.sock.close()
                return answer
            found = _ID.search(data)
            if not data.startswith(b"HTTP/1.1 200 ") or (found is None and b'"error"' in data):
                raise SystemExit(f"the router refused: {data[:2000]!r}")
            if found is None:
                stream.tail = data
                return None
            answer.id, answer.first_s = found[1].decode(), now_s
        answer.events += (stream.tail[-len(_EVENT) + 1 :] + data).count(_EVENT)
        stream.tail = (stream.tail + data)[-_TAIL_BYTES:]
        if not data.endswith(_END) and not stream.tail.endswith(_END):
            return None
        answer.last_s = now_s
        told = _TOKENS.findall(stream.tail)
        if not told or int(told[-1]) != stream.due.tokens:
            raise SystemExit(f"an answer of {stream.due.tokens} tokens ended with {stream.tail!r}")
        self._selector.unregister(stream.sock)
        self._idle.append(stream.sock)
        return answer


def request(prompt: str | Sequence[int], tokens: int) -> bytes:
    """A streamed completion with usage, as bytes for the wire."""
    body: dict[str, Any] = {
        "model": "tandem-tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    return _HEAD.format(path="/v1/completions", length=len(data)).encode() + data
