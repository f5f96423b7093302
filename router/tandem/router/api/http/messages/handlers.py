"""Routes of the Messages API: a message, streamed or whole, and the count of the tokens of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from tandem.router.api.frontend import Frontend
from tandem.router.api.http.body_parser import read_json
from tandem.router.api.http.chat_parts import deltas, has_call
from tandem.router.api.http.errors import MESSAGES_PATH
from tandem.router.api.http.messages.conversation import chat_messages, rendering_of
from tandem.router.api.http.messages.events import PING, MessageWriter
from tandem.router.api.http.messages.objects import REASONING, MessageEnd, content_of, message_object
from tandem.router.api.http.messages.schemas import CountTokensRequest, MessagesRequest, without_neutral
from tandem.router.api.http.messages.thinking import effort_of, limit_of, shows_thoughts
from tandem.router.api.http.messages.tools import tool_use
from tandem.router.api.http.middleware import (
    Endpoint,
    arrived_s_of,
    call_of,
    caller_of,
    counted,
    header,
    json_response,
    present,
    wish_of,
)
from tandem.router.api.http.protocol import StraightLine
from tandem.router.api.http.response_bodies import (
    ROUTE_HEADER,
    TIMING_HEADER,
    AnswerReply,
    ResponseFrame,
    UpdateWriter,
    no_message,
)
from tandem.router.api.http.responses.objects import new_id
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.serving.choices import WholeChoices
from tandem.router.serving.output_grammar import schema_grammar
from tandem.router.serving.response_stream import ResponseStream
from tandem.router.tracing.calls import Call

PING_S = 15.0
"""A stream is never silent for twice as long: proxies close connections on which nothing comes."""
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k")


def add_messages(add_route: Callable[[str, Endpoint], None], frontend: Frontend) -> None:
    """Put the Messages API into an application by its `add_route` for POST."""
    api = _MessagesApi(frontend)
    add_route(MESSAGES_PATH, counted(frontend, "messages", api.create))
    add_route(f"{MESSAGES_PATH}/count_tokens", counted(frontend, "count_tokens", api.count_tokens))


class _MessagesApi:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def create(self, request: Request) -> Response:
        frontend, received_s = self._frontend, arrived_s_of(request)
        body = await read_json(request, frontend.settings.max_body_bytes, MessagesRequest, without_neutral)
        ask = _ask(body)
        ask.caller, ask.wish, call = caller_of(request), wish_of(request), call_of(request)
        with present(request):
            works = await frontend.read(ask, received_s, call)
        return MessageReply(
            frontend,
            works,
            body,
            call,
            wants_timing=header(request, TIMING_HEADER) == "1",
            wants_route=header(request, ROUTE_HEADER) == "1" and ask.caller.sees_load,
        )

    async def count_tokens(self, request: Request) -> Response:
        frontend = self._frontend
        body = await read_json(request, frontend.settings.max_body_bytes, CountTokensRequest, without_neutral)
        return json_response({"input_tokens": await frontend.reader.count_tokens(_chat(body))})


class MessageReply(AnswerReply):
    """Writes a message, or its events."""

    def __init__(
        self,
        frontend: Frontend,
        works: Sequence[GenerationRequest],
        body: MessagesRequest,
        call: Call | None,
        *,
        wants_timing: bool,
        wants_route: bool,
    ) -> None:
        frame = ResponseFrame(
            id=new_id("msg"),
            created=int(frontend.wall_s()),
            model=body.model,
            is_chat=True,
            prompts=(),
        )
        super().__init__(
            frontend,
            works,
            frame,
            call,
            is_stream=bool(body.stream),
            wants_timing=wants_timing,
            wants_route=wants_route,
        )
        self._is_cut = works[0].sampling.max_tokens < body.max_tokens
        self._shows_thoughts = shows_thoughts(body)

    def _names(self) -> dict[str, str]:
        return {"request-id": self._frame.id, **super()._names()}

    async def _stream(self, answer: ResponseStream, send: Send) -> None:
        message, model = self._frame.id, self._frame.model
        self._events = MessageWriter(
            message, model, lambda: answer.usage, is_cut=self._is_cut, shows_thoughts=self._shows_thoughts
        )
        pinging = asyncio.create_task(self._ping(answer, send))
        try:
            await super()._stream(answer, send)
        finally:
            pinging.cancel()

    async def _ping(self, answer: ResponseStream, send: Send) -> None:
        """Send a ping whenever nothing was written for PING_S. The answer's head leaves with the first of them: from
        then on a failure is an event."""
        writes = self._events.writes
        while True:
            await asyncio.sleep(PING_S)
            if self._events.writes == writes:
                await self._start(answer, send)
                line = StraightLine.of(send)
                if line is not None and line.is_free:
                    line.write(PING)
            writes = self._events.writes

    def _writer(self, answer: ResponseStream) -> UpdateWriter:
        return self._events

    async def _whole(self, answer: ResponseStream, scope: Scope, send: Send) -> None:
        whole = WholeChoices(1)
        while (updates := await answer.next()) is not None:
            whole.add(updates)
        headers = self._head_of(answer)
        if self._wants_timing:
            headers[TIMING_HEADER] = orjson.dumps(answer.timing()).decode()
        (choice,) = whole.choices(1)
        said = [{"content": choice.text}] if choice.parts is None else deltas(choice.parts, REASONING)
        content = content_of(said, shows_thoughts=self._shows_thoughts)
        calls = has_call(choice.parts)
        end = MessageEnd(finish=choice.finish, stop=choice.stop, is_cut=self._is_cut, calls_tools=calls)
        body = message_object(self._frame.id, self._frame.model, content, end, answer.usage)
        self._has_started = True
        response = Response(orjson.dumps(body), headers=headers, media_type="application/json")
        await response(scope, no_message, send)


def _ask(body: MessagesRequest) -> GenerationRequest:
    """The chat that a request asks for. Its answer is at most `max_tokens` long and ends with the context of the model,
    as clients ask for as much as the largest of Anthropic's models writes."""
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    return replace(
        _chat(body),
        options={name: value for name, value in given.items() if value is not None},
        stop=tuple(body.stop_sequences or ()),
        is_whole=not body.stream,
        default_max_tokens=body.max_tokens,
    )


def _chat(body: CountTokensRequest) -> GenerationRequest:
    """The fields of the same chat that its prompt is made of."""
    wanted = body.output_config.format if body.output_config is not None else None
    use = tool_use(body.tools or (), body.tool_choice)
    return GenerationRequest(
        api="messages",
        served_model=body.model,
        messages=chat_messages(body),
        rendering=replace(rendering_of(body), tools=use.tools if use is not None else ()),
        tools=use,
        effort=effort_of(body),
        thought_limit=limit_of(body),
        output_grammar=None if wanted is None else schema_grammar(wanted.schema_, "output_config.format.schema"),
    )
