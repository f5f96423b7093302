"""HTTP/1.1 as uvicorn speaks it, with bounds on a client's bytes before it is authenticated: those of a request's head,
the time until it is complete, and what is sent behind a request that was not answered yet."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tandem.core.errors import InvalidRequestError, TandemError
from tandem.router.api.http.errors import error_body

HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, about: what came with the end of the body before, or with the head's own, is not
counted."""
HEAD_S = 30.0
MAX_PIPELINED = 16
PIPELINED_BYTES = 256 * 1024
"""Requests, and bytes, that may wait on a connection behind the one that is being answered, and behind one read."""


class StraightLine:
    """The rest of a body after its beginning was sent, past ASGI: ASGI's work for every chunk costs more than making
    it.

    Its end is sent by ASGI again.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport

    @classmethod
    def of(cls, send: Send) -> StraightLine | None:
        """That of a response which is sent by `send`; None where something is in between, or it is no chunked one."""
        cycle = getattr(send, "__self__", None)
        return cls(cycle) if isinstance(cycle, RequestResponseCycle) and cycle.chunked_encoding else None

    @property
    def is_free(self) -> bool:
        """True if the client takes more now, and is there."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write(self, chunk: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


class _TooManyError(Exception):
    """Raised through the parser, which reports no more than that a callback failed."""


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections that send no complete head in HEAD_S or too much behind a request, and answers 431 to heads,
    or trailers, over HEAD_BYTES.

    Between two requests the keep-alive limit of uvicorn counts.
    """

    _patience: asyncio.TimerHandle | None = None
    _loose_bytes = 0
    """That arrived since the last part of a body, or the last complete head."""
    _is_in_head = False
    _pipelined_bytes = 0
    _answered: RequestResponseCycle | None = None
    """The request that is being answered, or was last; `cycle` is the last that came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._be_patient()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        super().connection_lost(exc)
        answered = self._answered
        if answered is not None and answered is not self.cycle and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        self._loose_bytes += len(data)
        self._pipelined_bytes = self._pipelined_bytes + len(data) if self.pipeline else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._pipelined_bytes > PIPELINED_BYTES:
            self.transport.close()
        elif self._loose_bytes > HEAD_BYTES:
            self._refuse(InvalidRequestError("the headers are too long", why=f"the limit is {HEAD_BYTES} bytes"))
        elif self._patience is None and not self._is_busy:
            self._be_patient()

    def send_400_response(self, msg: str) -> None:
        """Nothing is written into the middle of an answer."""
        if self._is_answering:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooManyError
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._loose_bytes = False, 0
        self._end_patience()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._loose_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_busy(self) -> bool:
        return not self._is_in_head and self._is_answering

    def _be_patient(self) -> None:
        self._patience = self.loop.call_later(HEAD_S, self._lose_patience)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        if self._is_answering:
            self._be_patient()  # the answer before is still being written
        elif not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, error: TandemError) -> None:
        if self._is_answering:
            self.transport.close()
            return
        body = error_body(error, 431)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[431] + head + body)
        self.transport.close()
