"""The page's way to the API: its chat goes through the port that clients use, guard, admission and all.

Browsers let a page talk to the port that it came from alone, and a browser that reaches the admin port need not reach
the API's.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tandem.core.errors import InvalidRequestError, UnavailableError
from tandem.core.logs import event
from tandem.router.api.http.body_parser import read_body
from tandem.router.api.servers import TlsFiles

_log = logging.getLogger(__name__)
CHAT_PATH = "/admin/v1/chat"
API_KEY_HEADER = "tandem-api-key"
"""The key for the API, where it wants one: `Authorization` has the admin's."""
MAX_CHAT_BYTES = 256 * 1024
_API_PATH = "/v1/chat/completions"
_CONNECT_S = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - nothing is bound here
_PASSED_ON = ("content-type", "retry-after")
CUT_OFF = (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
"""Errors of an exchange that broke off, or with something that is no response."""


@dataclass(frozen=True, slots=True)
class ApiRelay:
    """`host`, as it is configured, and `port` of the API; `tls`: its certificate, None = it speaks plain HTTP. One
    answer may take `timeout_s`."""

    host: str
    port: Callable[[], int]
    tls: TlsFiles | None
    timeout_s: float

    async def chat(self, request: Request) -> Response:
        """The API's answer to the body of `request`, while it comes; UnavailableError if nothing answers there."""
        body = await read_body(request, MAX_CHAT_BYTES)
        key = request.headers.get(API_KEY_HEADER, "")
        if not key.isascii() or not key.isprintable():
            raise InvalidRequestError("the API key has a character that no key has", param=API_KEY_HEADER)
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UnavailableError("the API of this router does not answer", why=why, todo="try again") from error
        answer = HttpExchange(reader, writer)
        try:
            async with asyncio.timeout(self.timeout_s):
                headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
                await answer.begin("POST", _API_PATH, "localhost", headers, body)
        except CUT_OFF as error:
            answer.close()
            why = f"{type(error).__name__}: {error}"
            raise UnavailableError("the API of this router gave no answer", why=why, todo="try again") from error
        except asyncio.CancelledError:
            answer.close()
            raise
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        return _Relayed(answer, self.timeout_s, headers)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host = _ANYWHERE.get(self.host, self.host)
        return await asyncio.open_connection(host, self.port(), ssl=None if self.tls is None else _trusting(self.tls))


def _trusting(tls: TlsFiles) -> ssl.SSLContext:
    """Of a client that takes this router's own certificate, whatever name stands in it, and no other."""
    context = ssl.create_default_context(cafile=str(tls.cert))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class HttpExchange:
    """One request to a server of ours and its response, of a stated length or in chunks, over a connection of its
    own. `headers`: the response's, by names in lower case."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def begin(self, method: str, target: str, host: str, headers: Mapping[str, str], body: bytes) -> None:
        """Send the request, and read the head of the response; any of CUT_OFF if that fails."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "\r\n"]).encode("latin-1") + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        self.status = int(first.partition(" ")[2][:3])  # ValueError if it is none
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    async def whole(self, most_bytes: int) -> bytes:
        """The body, of a stated length; ValueError if that is above `most_bytes`."""
        length = int(self.headers.get("content-length", "0"))
        if length > most_bytes:
            raise ValueError(f"an answer of {length} bytes")
        return await self._reader.readexactly(length)

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            yield await self.whole(sys.maxsize)
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)

    def close(self) -> None:
        """Close the connection. A client that has not read all of it has left: the API cancels its request."""
        with suppress(OSError):
            self._writer.close()


class _Relayed(StreamingResponse):
    """An answer on its way to the page; closed however that ends."""

    def __init__(self, answer: HttpExchange, timeout_s: float, headers: dict[str, str]) -> None:
        super().__init__(answer.parts(), status_code=answer.status, headers={**headers, "cache-control": "no-store"})
        self._answer, self._timeout_s = answer, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().__call__(scope, receive, send)
        except* CUT_OFF as errors:
            event(_log, "a chat was cut off", logging.WARNING, why=str(errors.exceptions[0]))
        finally:
            self._answer.close()
