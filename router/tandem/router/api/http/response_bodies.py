"""OpenAI responses over raw ASGI: whole objects in pieces, and chunks of a stream as ready bytes without any model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.core.errors import CancelledError, InternalError, TandemError
from tandem.core.ids import RequestId
from tandem.router.api.frontend import Frontend
from tandem.router.api.http.chat_parts import deltas, finish_of, has_call, message
from tandem.router.api.http.errors import error_event, error_response
from tandem.router.api.http.logprob_bodies import Logprobs
from tandem.router.api.http.protocol import StraightLine
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.serving.choices import ChoiceUpdate, WholeChoices
from tandem.router.serving.response_stream import ResponseStream, TokenUsage, attend
from tandem.router.tracing.calls import Call


@dataclass(slots=True, kw_only=True)
class ResponseFrame:
    """Fields that every object of one answer repeats, and the options for the rest.

    `logprobs` and `prompt_logprobs` are how many alternatives, None = no log-probabilities. `prompts` are shown where
    `shows_token_ids`. Of each prompt's choices the `kept` best are shown, None = all.
    """

    id: str
    created: int
    model: str
    is_chat: bool
    prompts: Sequence[Sequence[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    wants_usage: bool = False
    shows_token_ids: bool = False
    kept: int | None = None
    wants_running_usage: bool = False
    """With every chunk: how much there is so far, over all choices."""
    names_tier: bool = False
    reasoning_fields: Sequence[str] = ()
    is_named_call: bool = False
    """The client named the function to be called: then the answer stops as any other."""


def usage_object(usage: TokenUsage) -> dict[str, Any]:
    details = {} if usage.reasoning_tokens is None else {"reasoning_tokens": usage.reasoning_tokens}
    if usage.predicted_tokens is not None:
        details |= zip(
            ("accepted_prediction_tokens", "rejected_prediction_tokens"), usage.predicted_tokens, strict=True
        )
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": details} if details else {}),
    }


def _tier(frame: ResponseFrame) -> dict[str, str]:
    """Name the only service tier, for a request that asked for one."""
    return {"service_tier": "default"} if frame.names_tier else {}


class UpdateWriter(Protocol):
    """Writes the server-sent events of one answer, of any API."""

    def write(self, update: ChoiceUpdate, usage: TokenUsage | None = None) -> bytes:
        """The events of one update; b"" if there is nothing to show yet. `usage` so far goes with them if given."""

    def closing(self, usage: TokenUsage, remark: bytes) -> bytes:
        """The events behind the last update, with a comment among them."""


class ChunkWriter:
    """Server-sent events of one answer. Only the text is encoded for each chunk; the rest is prepared once."""

    def __init__(self, frame: ResponseFrame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        kind = "chat.completion.chunk" if frame.is_chat else "text_completion"
        head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model, **_tier(frame)}
        self._head = orjson.dumps(head)[:-1]
        opening = b'"delta":{"content":' if frame.is_chat else b'"text":'
        self._starts = [
            b"data: " + self._head + b',"choices":[{"index":%d,' % index + opening for index in range(choice_count)
        ]
        self._tail = b',"usage":null}\n\n' if frame.wants_usage else b"}\n\n"
        self._is_text_alone = frame.logprobs is None and not frame.shows_token_ids
        self._after_text = b'},"logprobs":null' if frame.is_chat else b',"logprobs":null'
        self._after_text += b',"finish_reason":null}]'
        self._is_open = [False] * choice_count
        self._has_call = [False] * choice_count
        self._choices_each = choice_count // max(1, len(frame.prompts))

    def write(self, update: ChoiceUpdate, usage: TokenUsage | None = None) -> bytes:
        """The events of one update; b"" if there is nothing to show yet. `usage` so far goes with them if given."""
        if usage is not None:
            self._tail = b',"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n"
        is_first = not self._is_open[update.index]
        is_plain = self._is_text_alone and update.parts is None
        if is_plain and not is_first and update.finish is None:  # as nearly always
            if not update.text:
                return b""
            return b"".join((self._starts[update.index], orjson.dumps(update.text), self._after_text, self._tail))
        self._is_open[update.index] = True
        return self._chat(update, is_first) if self._frame.is_chat else self._completion(update, is_first)

    def closing(self, usage: TokenUsage, remark: bytes) -> bytes:
        """The events behind the last update, with a comment among them."""
        end = remark + b"data: [DONE]\n\n"
        if not self._frame.wants_usage:
            return end
        return b"data: " + self._head + b',"choices":[],"usage":' + orjson.dumps(usage_object(usage)) + b"}\n\n" + end

    def _chat(self, update: ChoiceUpdate, is_first: bool) -> bytes:
        events = b""
        if is_first:
            prompt = b""
            if self._frame.shows_token_ids:
                prompt = b',"prompt_token_ids":' + orjson.dumps(list(self._prompt(update.index)))
            events = self._event(update.index, {"role": "assistant", "content": ""}, None, prompt)
        if update.parts is not None:
            return events + self._parts(update)
        has_logprobs = self._has_logprobs(update)
        if update.text or has_logprobs or (self._frame.shows_token_ids and update.tokens):
            shown = b"".join(self._logprobs.chat(update)) if has_logprobs else b"null"
            events += self._starts[update.index] + orjson.dumps(update.text) + b'},"logprobs":' + shown
            events += b',"finish_reason":null' + self._token_ids(update) + b"}]" + self._tail
        if update.finish is not None:
            events += self._event(update.index, {}, update.finish)
        return events

    def _parts(self, update: ChoiceUpdate) -> bytes:
        """An event for each part; the first one has the log-probabilities and ids of all tokens."""
        events = b""
        shown = list(deltas(update.parts or (), self._frame.reasoning_fields))
        has_logprobs = self._has_logprobs(update)
        if not shown and (has_logprobs or (self._frame.shows_token_ids and update.tokens)):
            shown = [{"content": ""}]
        logprobs = b"".join(self._logprobs.chat(update)) if has_logprobs else b"null"
        token_ids = self._token_ids(update)
        for delta in shown:
            choice = orjson.dumps({"index": update.index, "delta": delta})[:-1]
            events += b"data: " + self._head + b',"choices":[' + choice + b',"logprobs":' + logprobs
            events += b',"finish_reason":null' + token_ids + b"}]" + self._tail
            logprobs, token_ids = b"null", b',"token_ids":[]' if token_ids else b""
        self._has_call[update.index] |= has_call(update.parts)
        if update.finish is not None:
            called = self._has_call[update.index] and not self._frame.is_named_call
            events += self._event(update.index, {}, finish_of(update.finish, has_call=called))
        return events

    def _completion(self, update: ChoiceUpdate, is_first: bool) -> bytes:
        has_logprobs = self._has_logprobs(update)
        if not (update.text or has_logprobs or update.finish or (self._frame.shows_token_ids and update.tokens)):
            self._is_open[update.index] = not is_first
            return b""
        shown = b"".join(self._logprobs.completion(update, self._frame.logprobs)) if has_logprobs else b"null"
        event = self._starts[update.index] + orjson.dumps(update.text) + b',"logprobs":' + shown
        event += b',"finish_reason":' + orjson.dumps(update.finish) + self._token_ids(update)
        if is_first and self._frame.shows_token_ids:
            event += b',"prompt_token_ids":' + orjson.dumps(list(self._prompt(update.index)))
        return event + b"}]" + self._tail

    def _has_logprobs(self, update: ChoiceUpdate) -> bool:
        return self._frame.logprobs is not None and (update.text_tokens > 0 or update.echo is not None)

    def _token_ids(self, update: ChoiceUpdate) -> bytes:
        return b',"token_ids":' + orjson.dumps(update.tokens) if self._frame.shows_token_ids else b""

    def _prompt(self, index: int) -> Sequence[int]:
        return self._frame.prompts[index // self._choices_each]

    def _event(self, index: int, delta: dict[str, Any], finish: str | None, more: bytes = b"") -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + more + self._tail


class WholeAnswer:
    """Collects the updates of an answer that is not streamed."""

    def __init__(self, frame: ResponseFrame, choice_count: int, logprobs: Logprobs) -> None:
        self._frame, self._logprobs = frame, logprobs
        self._whole = WholeChoices(choice_count)

    def add(self, updates: Sequence[ChoiceUpdate]) -> None:
        self._whole.add(updates)

    def pieces(self, usage: TokenUsage) -> Iterator[bytes]:
        """The body, each piece the work of some milliseconds at most."""
        frame = self._frame
        kind = "chat.completion" if frame.is_chat else "text_completion"
        choices = self._whole.choices(len(frame.prompts), frame.kept)
        head = {"id": frame.id, "object": kind, "created": frame.created, "model": frame.model, **_tier(frame)}
        yield orjson.dumps(head)[:-1] + b',"choices":['
        each = len(choices) // len(frame.prompts)
        for place, choice in enumerate(choices):
            yield b"," if place else b""
            yield from self._choice(choice)
            if not frame.is_chat:
                yield from self._of_prompt(choice, frame.prompts[place // each])
            yield b"}"
        yield b'],"usage":' + orjson.dumps(usage_object(usage))
        if frame.is_chat:
            yield from self._of_prompt(choices[0], frame.prompts[0])
        yield b"}"

    def _choice(self, choice: ChoiceUpdate) -> Iterator[bytes]:
        """Without its last brace."""
        body: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        if self._frame.is_chat:
            body["message"] = message(choice, self._frame.reasoning_fields)
            called = has_call(choice.parts) and not self._frame.is_named_call
            body["finish_reason"] = finish_of(choice.finish, has_call=called)
        else:
            body["text"] = choice.text
        if self._frame.shows_token_ids:
            body["token_ids"] = choice.tokens
        yield orjson.dumps(body)[:-1] + b',"logprobs":'
        count = self._frame.logprobs
        if count is None:
            yield b"null"
        elif self._frame.is_chat:
            yield from self._logprobs.chat(choice)
        else:
            yield from self._logprobs.completion(choice, count)

    def _of_prompt(self, choice: ChoiceUpdate, prompt: Sequence[int]) -> Iterator[bytes]:
        """Write the requested fields about the prompt of a choice, behind other fields."""
        if self._frame.shows_token_ids:
            yield b',"prompt_token_ids":' + orjson.dumps(list(prompt))
        count = self._frame.prompt_logprobs
        if count is not None:
            yield b',"prompt_logprobs":'
            yield from self._logprobs.prompt(choice.prompt_logprobs or (), count)


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
    """Runs one answer while it sends it, streamed or whole, and ends it when the client goes away. Before the first
    token a failure is a plain HTTP error."""

    def __init__(
        self,
        frontend: Frontend,
        works: Sequence[GenerationRequest],
        frame: ResponseFrame,
        call: Call | None,
        *,
        is_stream: bool,
        wants_timing: bool,
        wants_route: bool = False,
    ) -> None:
        super().__init__()
        self._frontend, self._works, self._frame, self._call = frontend, works, frame, call
        self._is_stream, self._wants_timing, self._wants_route = is_stream, wants_timing, wants_route
        self._has_started = False
        self._is_gone = False

    @cached_property
    def _logprobs(self) -> Logprobs:
        return Logprobs(self._frontend.models.find(self._frame.model).tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._frontend.open(RequestId(self._frame.id), self._works, self._call) as answer:
                await asyncio.sleep(0)  # what goes to the workers leaves first
                await attend(answer, self._deliver(answer, scope, send), self._watch(receive, answer))
        except TandemError as error:  # no worker could take the request
            self._frontend.metrics.request_ended(self._works[0].api, error.code)
            await self._fail(error, scope, send)
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error, never as silence
            failure = _bug(error, self._frame.id)
            self._frontend.metrics.request_ended(self._works[0].api, failure.code)
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
        writer, end = self._writer(answer), b""
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
        timing = b": tandem-timing " + orjson.dumps(answer.timing()) + b"\n\n" if self._wants_timing else b""
        end += writer.closing(answer.usage, timing)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _writer(self, answer: ResponseStream) -> UpdateWriter:
        """Make the writer of the events of a stream."""
        return ChunkWriter(self._frame, answer.choice_count, self._logprobs)

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
        await response(scope, no_message, send)

    def _head_of(self, answer: ResponseStream) -> dict[str, str]:
        headers = self._names()
        if self._wants_route:
            headers[ROUTE_HEADER] = orjson.dumps(answer.decision()).decode()
        return headers

    def _names(self) -> dict[str, str]:
        """Headers with the answer's id, and its trace."""
        call = self._call
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
            response = error_response(error, headers=self._names(), path=scope["path"])
            await response(scope, no_message, send)
        elif self._is_stream:
            event = error_event(error, scope["path"], self._frame.id)
            await send({"type": "http.response.body", "body": event, "more_body": False})


class _Pouring:
    """Writes events in the turn in which their tokens came, as long as the client takes them. Those of the last tokens
    are left in `end`."""

    def __init__(self, answer: ResponseStream, writer: UpdateWriter, line: StraightLine, has_usage: bool) -> None:
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


def _events(writer: UpdateWriter, updates: Sequence[ChoiceUpdate], usage: TokenUsage | None) -> bytes:
    if len(updates) == 1:  # as nearly always
        return writer.write(updates[0], usage)
    return b"".join([writer.write(update, usage) for update in updates])


def _bug(error: Exception, request: str) -> InternalError:
    _log.exception("answer failed", extra={"fields": {"request": request}})
    return InternalError("the router failed", why=type(error).__name__, todo="report this")


async def no_message() -> dict[str, str]:
    return {"type": "http.disconnect"}
