"""Sends an answer over raw ASGI, streamed or whole, and ends it when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import CancelledError, InternalError, TandemError
from tandem.core.ids import RequestId
from tandem.router.api.http.errors import error_event, error_response
from tandem.router.api.http.protocol import StraightLine
from tandem.router.api.http.response_bodies import ChunkWriter, Logprobs, ResponseFrame, WholeAnswer
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.serving.choices import AnswerSettings, ChoiceUpdate
from tandem.router.serving.response_stream import ResponseFactory, ResponseStream, TokenUsage, attend

_log = logging.getLogger(__name__)
TIMING_HEADER = "x-tandem-timing"
ROUTE_HEADER = "x-tandem-route"
MANY_LOGPROBS = 256
"""More tokens with log-probabilities in one event, which a slow reader gets, are written in a thread."""
SLICE_BYTES = 32 * 1024
"""Of a body that is not streamed, written in one turn of the event loop, about."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class AnswerReply(Response):
    """Runs one answer while it sends it. Before the first token a failure is a plain HTTP error."""

    def __init__(
        self,
        response_factory: ResponseFactory,
        works: Sequence[GenerationRequest],
        frame: ResponseFrame,
        settings: AnswerSettings,
        *,
        is_stream: bool,
        wants_timing: bool,
        wants_route: bool = False,
    ) -> None:
        super().__init__()
        self._response_factory, self._works, self._frame, self._settings = response_factory, works, frame, settings
        self._is_stream, self._wants_timing, self._wants_route = is_stream, wants_timing, wants_route
        self._logprobs = Logprobs(settings.tokenizer)
        self._has_started = False
        self._is_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._response_factory.open(RequestId(self._frame.id), self._works, self._settings) as answer:
                await asyncio.sleep(0)  # what goes to the workers leaves first
                await attend(answer, self._deliver(answer, scope, send), self._watch(receive, answer))
        except TandemError as error:  # no worker could take the request
            self._response_factory.metrics.request_ended(self._settings.api, error.code)
            await self._fail(error, scope, send)
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error, never as silence
            failure = _bug(error, self._frame.id)
            self._response_factory.metrics.request_ended(self._settings.api, failure.code)
            await self._fail(failure, scope, send)

    async def _deliver(self, answer: ResponseStream, scope: Scope, send: Send) -> None:
        try:
            await (self._stream(answer, send) if self._is_stream else self._whole(answer, scope, send))
        except TandemError as error:
            await self._fail(error, scope, send)
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error, never as silence
            failure = _bug(error, self._frame.id)
            answer.cancel(failure)
            await self._fail(failure, scope, send)

    async def _watch(self, receive: Receive, answer: ResponseStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self._is_gone = True
        answer.cancel(CancelledError("the client closed the connection"))

    async def _stream(self, answer: ResponseStream, send: Send) -> None:
        writer = ChunkWriter(self._frame, answer.choice_count, self._logprobs)
        end = b""
        while (updates := await answer.next()) is not None:
            usage = answer.usage if self._frame.wants_running_usage else None
            if any(update.prompt_logprobs or len(update.logprobs) > MANY_LOGPROBS for update in updates):
                # long; other streams go on meanwhile
                events = await asyncio.to_thread(_events, writer, updates, usage)
            else:
                events = _events(writer, updates, usage)
            if answer.is_complete:
                end = events
                break
            if events:
                await self._start(answer, send)
                await send({"type": "http.response.body", "body": events, "more_body": True})
            line = StraightLine.of(send) if self._frame.logprobs is None else None
            if line is not None:
                pouring = _Pouring(answer, writer, line, self._frame.wants_running_usage)
                await answer.follow(pouring.show)
                end = pouring.end
        await self._start(answer, send)
        if self._frame.wants_usage:
            end += writer.usage(answer.usage)
        if self._wants_timing:
            end += b": tandem-timing " + orjson.dumps(answer.timing()) + b"\n\n"
        await send({"type": "http.response.body", "body": end + b"data: [DONE]\n\n", "more_body": False})

    async def _whole(self, answer: ResponseStream, scope: Scope, send: Send) -> None:
        whole = WholeAnswer(self._frame, answer.choice_count, self._logprobs)
        while (updates := await answer.next()) is not None:
            whole.add(updates)
        headers = self._head_of(answer)
        if self._wants_timing:
            headers[TIMING_HEADER] = orjson.dumps(answer.timing()).decode()
        self._has_started = True
        pieces, fresh_bytes = [], 0
        for piece in whole.pieces(answer.usage):
            pieces.append(piece)
            fresh_bytes += len(piece)
            if fresh_bytes > SLICE_BYTES:
                fresh_bytes = 0
                await asyncio.sleep(0)  # other streams go on meanwhile
        response = Response(b"".join(pieces), headers=headers, media_type="application/json")
        await response(scope, _no_message, send)

    def _head_of(self, answer: ResponseStream) -> dict[str, str]:
        headers = self._names()
        if self._wants_route:
            headers[ROUTE_HEADER] = orjson.dumps(answer.decision()).decode()
        return headers

    def _names(self) -> dict[str, str]:
        """Headers with the answer's id, and its trace."""
        call = self._settings.call
        return {"x-request-id": self._frame.id, **({} if call is None else call.names)}

    async def _start(self, answer: ResponseStream, send: Send) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [*_SSE_HEADERS, *((k.encode(), v.encode()) for k, v in self._head_of(answer).items())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _fail(self, error: TandemError, scope: Scope, send: Send) -> None:
        """Send the error of a failed answer; `attend` bounds how long a client may take to receive it."""
        if self._is_gone:
            return
        if not self._has_started:
            response = error_response(error, headers=self._names())
            await response(scope, _no_message, send)
        elif self._is_stream:
            await send({"type": "http.response.body", "body": error_event(error), "more_body": False})


class _Pouring:
    """Writes events in the turn in which their tokens came, as long as the client takes them. Those of the last tokens
    are left in `end`."""

    def __init__(self, answer: ResponseStream, writer: ChunkWriter, line: StraightLine, has_usage: bool) -> None:
        self._answer, self._writer, self._line, self._has_usage = answer, writer, line, has_usage
        self.end = b""

    def show(self) -> bool:
        """False = not now."""
        answer, line = self._answer, self._line
        if not line.is_free:
            return False
        updates = answer.next_now()
        usage = answer.usage if self._has_usage else None
        events = _events(self._writer, updates, usage)
        if answer.is_complete:
            self.end = events
        elif events:
            line.write(events)
        return True


def _events(writer: ChunkWriter, updates: Sequence[ChoiceUpdate], usage: TokenUsage | None) -> bytes:
    if len(updates) == 1:  # as nearly always
        return writer.write(updates[0], usage)
    return b"".join([writer.write(update, usage) for update in updates])


def _bug(error: Exception, request: str) -> InternalError:
    _log.exception("answer failed", extra={"fields": {"request": request}})
    return InternalError("the router failed", why=type(error).__name__, todo="report this")


async def _no_message() -> dict[str, str]:
    return {"type": "http.disconnect"}
