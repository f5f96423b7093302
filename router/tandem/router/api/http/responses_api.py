"""Routes of the Responses API: create (streamed or whole), read, list the input of, and delete a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope, Send

from tandem.core.errors import InvalidRequestError, TandemError, UnsupportedParameterError
from tandem.core.ids import RequestId
from tandem.router.api.frontend import Frontend
from tandem.router.api.http.body_parser import read_json
from tandem.router.api.http.middleware import (
    arrived_s_of,
    call_of,
    caller_of,
    counted,
    guarded,
    header,
    json_response,
    present,
    tenant_of,
    wish_of,
)
from tandem.router.api.http.output_fields import format_grammar
from tandem.router.api.http.paging import Page, page_of
from tandem.router.api.http.response_bodies import ROUTE_HEADER, TIMING_HEADER, AnswerReply, ResponseFrame
from tandem.router.api.http.responses.chat import Message, for_template, items_of, messages_of
from tandem.router.api.http.responses.conversation import ConversationStore, Past
from tandem.router.api.http.responses.events import OutputWriter
from tandem.router.api.http.responses.objects import Draft, new_id
from tandem.router.api.http.responses.schemas import ResponseRequest, without_neutral
from tandem.router.api.http.responses.tools import tool_use
from tandem.router.api.http.schemas import StreamOptions
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.serving.response_stream import ResponseStream
from tandem.router.tokenization.chat_template import Rendering
from tandem.router.tracing.calls import Call
from tandem.statestore.stores.responses import ResponseStore, StoredResponse

Keep = Callable[[bytes, Sequence[Message]], Awaitable[bool]]
"""Store the finished object, given as JSON, with the messages of its output; False = not stored."""


def add_responses(app: FastAPI, frontend: Frontend, store: ResponseStore, max_response_bytes: int) -> None:
    """Put the Responses API into `app`."""
    api = _Api(frontend, ConversationStore(store, max_response_bytes))
    app.add_route("/v1/responses", counted(frontend, "responses", api.create), methods=["POST"])
    app.add_route("/v1/responses/{response_id}", guarded(api.read), methods=["GET"])
    app.add_route("/v1/responses/{response_id}", guarded(api.delete), methods=["DELETE"])
    app.add_route("/v1/responses/{response_id}/input_items", guarded(api.input_items), methods=["GET"])
    app.add_route("/v1/responses/{response_id}/cancel", guarded(api.cancel), methods=["POST"])


class _Api:
    def __init__(self, frontend: Frontend, conversations: ConversationStore) -> None:
        self._frontend, self._conversations = frontend, conversations

    async def create(self, request: Request) -> Response:
        frontend = self._frontend
        received_s = arrived_s_of(request)
        body = await read_json(request, frontend.settings.max_body_bytes, ResponseRequest, without_neutral)
        _check_streaming(body)
        frontend.models.find(body.model)
        tenant = tenant_of(request)
        past = await self._conversations.past(tenant, body.previous_response_id)
        items = items_of(body.input)
        said = _said(items)
        ask = _ask(body, past, said)
        ask, call = replace(ask, caller=caller_of(request), wish=wish_of(request)), call_of(request)
        draft = Draft(id=new_id("resp"), created_s=int(frontend.wall_s()), request=body)
        written = orjson.dumps(items) if body.store is not False else b""

        def stored(finished: bytes, answer: Sequence[Message]) -> StoredResponse:
            turn = orjson.dumps([*said, *answer])
            return StoredResponse(id=draft.id, tenant=tenant, body=finished, items=written, turn=turn, chain=past.chain)

        async def keep(finished: bytes, answer: Sequence[Message]) -> bool:
            return await self._conversations.keep(stored(finished, answer))

        if body.store is not False:
            await self._conversations.check_room(stored(orjson.dumps(draft.begun()), ()))
        with present(request):
            works = await self._read(ask, received_s, call)

        return _Reply(
            frontend,
            works,
            draft,
            call,
            keep if body.store is not False else _keep_nothing,
            is_stream=bool(body.stream),
            wants_timing=header(request, TIMING_HEADER) == "1",
            wants_route=header(request, ROUTE_HEADER) == "1" and ask.caller.sees_load,
            wall_s=frontend.wall_s,
        )

    async def read(self, request: Request) -> Response:
        _refuse_query(request, "stream", "include", "starting_after", "include_obfuscation")
        stored = await self._conversations.load(tenant_of(request), request.path_params["response_id"])
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response = request.path_params["response_id"]
        await self._conversations.delete(tenant_of(request), response)
        return json_response({"id": response, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        _refuse_query(request, "include")
        page = page_of(request, largest=100, default=20)
        stored = await self._conversations.load(tenant_of(request), request.path_params["response_id"])
        return json_response(_listed(orjson.loads(stored.items), page))

    async def cancel(self, request: Request) -> Response:
        response = request.path_params["response_id"]
        await self._conversations.load(tenant_of(request), response)
        raise InvalidRequestError(
            "only responses in the background can be cancelled", why="this server has none", param="response_id"
        )

    async def _read(self, ask: GenerationRequest, received_s: float, call: Call | None) -> list[GenerationRequest]:
        try:
            return await self._frontend.read(ask, received_s, call)
        except InvalidRequestError as error:
            if error.param != "messages":
                raise
            raise type(error)(error.what, why=error.why, todo=error.todo, param="input") from None


class _Reply(AnswerReply):
    """Writes a response object, or its events. It is stored before the client learns that it is complete."""

    def __init__(
        self,
        frontend: Frontend,
        works: Sequence[GenerationRequest],
        draft: Draft,
        call: Call | None,
        keep: Keep,
        *,
        is_stream: bool,
        wants_timing: bool,
        wants_route: bool,
        wall_s: Callable[[], float],
    ) -> None:
        frame = ResponseFrame(
            id=RequestId(draft.id),
            created=draft.created_s,
            model=draft.request.model,
            is_chat=True,
            prompts=(),
        )
        super().__init__(
            frontend,
            works,
            frame,
            call,
            is_stream=is_stream,
            wants_timing=wants_timing,
            wants_route=wants_route,
        )
        self._draft, self._keep, self._wall_s = draft, keep, wall_s
        self._output = OutputWriter(draft)

    async def _stream(self, answer: ResponseStream, send: Send) -> None:
        while (updates := await answer.next()) is not None:
            events = b"" if self._has_started else self._output.opening()
            events += b"".join(map(self._output.add, updates))
            await self._start(answer, send)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        end = self._output.end()
        end += self._output.closing(await self._finished(answer))
        if self._wants_timing:
            end += b": tandem-timing " + orjson.dumps(answer.timing()) + b"\n\n"
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _whole(self, answer: ResponseStream, scope: Scope, send: Send) -> None:
        while (updates := await answer.next()) is not None:
            for update in updates:
                self._output.add(update)
        self._output.end()
        headers = self._head_of(answer)
        if self._wants_timing:
            headers[TIMING_HEADER] = orjson.dumps(answer.timing()).decode()
        body = await self._finished(answer)
        self._has_started = True
        response = Response(orjson.dumps(body), headers=headers, media_type="application/json")
        await response(scope, _no_message, send)

    async def _fail(self, error: TandemError, scope: Scope, send: Send) -> None:
        if not (self._has_started and self._is_stream):
            await super()._fail(error, scope, send)
        elif not self._is_gone:
            await send({"type": "http.response.body", "body": self._output.failed(error), "more_body": False})

    async def _finished(self, answer: ResponseStream) -> dict[str, Any]:
        """The finished object, stored if it is to be; `store` states whether it was."""
        output = self._output
        body = self._draft.ended(output.items, output.finish, answer.usage, int(self._wall_s()), is_kept=True)
        if not await self._keep(orjson.dumps(body), messages_of(output.items)):
            body["store"] = False
        return body


def _said(items: Sequence[dict[str, Any]]) -> Sequence[Message]:
    said = messages_of(items)
    if not said:
        why = "it is reasoning without content, which no model can read"
        raise InvalidRequestError("input has no message", why=why, todo="send a message, too", param="input")
    return said


def _ask(body: ResponseRequest, past: Past, said: Sequence[Message]) -> GenerationRequest:
    given = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_output_tokens}
    # Instructions are of this request alone: those of earlier turns are not carried over.
    first: tuple[Message, ...] = ({"role": "system", "content": body.instructions},) if body.instructions else ()
    wanted = body.text.format if body.text is not None else None
    use = tool_use(body.tools or (), body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
    return GenerationRequest(
        api="responses",
        served_model=body.model,
        messages=for_template((*first, *past.messages, *said), body.input),
        rendering=Rendering(tools=use.tools if use is not None else ()),
        tools=use,
        effort=body.reasoning.effort if body.reasoning is not None else None,
        effort_param="reasoning.effort",
        options={name: value for name, value in given.items() if value is not None},
        output_grammar=None if wanted is None else format_grammar(wanted, "text.format"),
        max_tokens_param="max_output_tokens",
        cache_key=body.prompt_cache_key,
    )


def _check_streaming(body: ResponseRequest) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequestError("stream_options is given without stream", todo="set stream: true",
                                  param="stream_options")  # fmt: skip
    for name in StreamOptions.model_fields:  # usage is in the last event anyway
        if getattr(body.stream_options, name, None):
            raise UnsupportedParameterError(
                f"{name} is not supported here", todo="leave it out", param=f"stream_options.{name}"
            )


def _refuse_query(request: Request, *names: str) -> None:
    for name in names:
        given = request.query_params.get(name) or request.query_params.get(f"{name}[]")
        if given and given != "false":
            raise UnsupportedParameterError(f"{name} is not supported yet", todo="leave it out", param=name)


def _listed(items: list[dict[str, Any]], page: Page) -> Mapping[str, Any]:
    ordered = items if page.is_ascending else items[::-1]
    ids = [item["id"] for item in ordered]
    start = ids.index(page.after) + 1 if page.after in ids else 0
    shown = ordered[start : start + page.limit]
    return page.listed(shown, has_more=start + page.limit < len(ordered))


async def _keep_nothing(finished: bytes, answer: Sequence[Message]) -> bool:
    return False


async def _no_message() -> dict[str, str]:
    return {"type": "http.disconnect"}
