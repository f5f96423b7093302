"""The public HTTP application: routes, and the promise that every answer with an error is an error object."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.core.errors import InvalidRequestError
from tandem.core.ids import new_request_id
from tandem.core.version import release
from tandem.router.api.frontend import Frontend
from tandem.router.api.http import schemas
from tandem.router.api.http.body_parser import M, Simplify, read_json
from tandem.router.api.http.chat_parts import reasoning_fields
from tandem.router.api.http.errors import error_response
from tandem.router.api.http.messages.handlers import add_messages
from tandem.router.api.http.middleware import (
    Endpoint,
    arrived_s_of,
    call_of,
    caller_of,
    counted,
    guarded,
    header,
    json_response,
    present,
    wish_of,
)
from tandem.router.api.http.openapi import document
from tandem.router.api.http.response_bodies import ROUTE_HEADER, TIMING_HEADER, AnswerReply, ResponseFrame
from tandem.router.api.http.schemas import (
    chat_ask,
    check_streaming,
    check_tokenizing,
    completion_ask,
    messages_of,
    rendering_of,
)
from tandem.router.api.http.unsupported_endpoints import absent
from tandem.router.dispatch.inflight_request import GenerationRequest
from tandem.router.error_quoting import shortened
from tandem.router.metrics.router import CONTENT_TYPE
from tandem.router.serving.request_parser import TokenizedModel, check_ids


def create_app(frontend: Frontend) -> FastAPI:
    """The application; it holds no state of its own."""
    # The framework's own telemetry would export clients' texts, if an environment variable enabled it.
    silence = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
    app = _App(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=silence)
    app.add_exception_handler(HTTPException, _http_error)
    api = _Api(frontend)
    app.add_hot_route("/v1/chat/completions", counted(frontend, "chat", api.chat))
    app.add_hot_route("/v1/completions", counted(frontend, "completions", api.completions))
    add_messages(app.add_hot_route, frontend)
    app.add_route("/tokenize", counted(frontend, "tokenize", api.tokenize), methods=["POST"])
    app.add_route("/detokenize", counted(frontend, "detokenize", api.detokenize), methods=["POST"])
    app.add_route("/v1/models", guarded(api.models), methods=["GET"])
    app.add_route("/v1/models/{model:path}", guarded(api.model), methods=["GET"])
    app.add_route("/livez", guarded(api.livez), methods=["GET"])
    app.add_route("/health", guarded(api.readyz), methods=["GET"])
    app.add_route("/version", guarded(api.version), methods=["GET"])
    app.add_route("/readyz", guarded(api.readyz), methods=["GET"])
    app.add_route("/metrics", guarded(api.metrics), methods=["GET"])
    app.add_route("/openapi.json", guarded(api.openapi), methods=["GET"])
    return app


def paths_of(app: FastAPI) -> frozenset[str]:
    """Paths that the application serves, with parameters as OpenAPI writes them: `/v1/models/{model}`."""
    return frozenset(re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path) for route in app.routes if isinstance(route, Route))


class _App(FastAPI):
    """Requests to hot routes go straight to their endpoints: the framework's layers cost as much as planning."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._hot: dict[str, Endpoint] = {}

    def add_hot_route(self, path: str, endpoint: Endpoint) -> None:
        """Add a POST route without parameters; its endpoint raises nothing."""
        self.add_route(path, endpoint, methods=["POST"])
        self._hot[path] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A middleware that was added is never passed by.
        is_hot = scope["type"] == "http" and scope["method"] == "POST" and not self.user_middleware
        endpoint = self._hot.get(scope["path"]) if is_hot else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)


class _Api:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._reasoning_fields = reasoning_fields(frontend.settings.reasoning_field)
        self._document: tuple[object, bytes] | None = None
        """The OpenAPI document, and what it was made of."""

    async def chat(self, request: Request) -> Response:
        received_s = arrived_s_of(request)
        body = await self._read(request, schemas.ChatRequest, schemas.without_neutral_chat)
        return await self._generate(request, body, chat_ask(body), received_s)

    async def completions(self, request: Request) -> Response:
        received_s = arrived_s_of(request)
        body = await self._read(request, schemas.CompletionRequest, schemas.without_neutral_completion)
        return await self._generate(request, body, completion_ask(body), received_s)

    async def _generate(
        self, request: Request, body: schemas.SamplingFields, ask: GenerationRequest, received_s: float
    ) -> Response:
        frontend = self._frontend
        check_streaming(body)
        wish = wish_of(request, body.priority, body.timeout)
        ask.caller, ask.wish, call = caller_of(request), wish, call_of(request)
        with present(request):
            works = await frontend.read(ask, received_s, call)
        is_chat = ask.api == "chat"
        frame = ResponseFrame(
            id=new_request_id("chatcmpl" if is_chat else "cmpl"),
            created=int(frontend.wall_s()),
            model=body.model,
            is_chat=is_chat,
            prompts=tuple(work.prompt for work in works),
            logprobs=ask.options.get("logprobs"),
            prompt_logprobs=ask.options.get("prompt_logprobs"),
            shows_token_ids=bool(body.return_token_ids),
            kept=ask.kept,
            wants_usage=bool(body.stream_options and body.stream_options.include_usage),
            wants_running_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
            names_tier=is_chat and body.service_tier is not None,
            reasoning_fields=self._reasoning_fields,
            is_named_call=ask.tools is not None and ask.tools.mode == "named",
        )
        return AnswerReply(
            frontend,
            works,
            frame,
            call,
            is_stream=bool(body.stream),
            wants_timing=header(request, TIMING_HEADER) == "1",
            wants_route=header(request, ROUTE_HEADER) == "1" and ask.caller.sees_load,
        )

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, schemas.TokenizeRequest)
        check_tokenizing(body)
        model = self._model_of(body.model)
        if body.messages is not None:
            tokens = await self._frontend.reader.encode_chat(model, messages_of(body.messages), rendering_of(body))
        else:
            add_special_tokens = body.add_special_tokens is not False
            tokens = await model.tokenizer.encode(body.prompt or "", add_special_tokens=add_special_tokens)
        limit = self._frontend.reader.context_tokens(model)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": limit or None})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, schemas.DetokenizeRequest)
        tokenizer = self._model_of(body.model).tokenizer
        check_ids("tokens", body.tokens, tokenizer.vocab_size)
        return json_response({"prompt": await tokenizer.text_of(body.tokens)})

    async def models(self, request: Request) -> Response:
        return json_response(
            {"object": "list", "data": [self._model(name) for name in self._frontend.models.served_names]}
        )

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_response(self._model(name))

    async def livez(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        missing = self._frontend.readiness.missing()
        is_ready = self._frontend.readiness.is_ready
        return json_response(
            {"status": "ready" if is_ready else "not ready", "missing": missing}, 200 if is_ready else 503
        )

    async def version(self, request: Request) -> Response:
        return json_response({"version": release()})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._frontend.scrape(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        """Made once for each set of models, paths and classes, beside the event loop: it takes a tenth of a second."""
        told = (self._frontend.models.served_names, paths_of(request.app), self._frontend.classes.names)
        if self._document is None or self._document[0] != told:
            self._document = told, await asyncio.to_thread(lambda: orjson.dumps(document(*told)))
        return Response(self._document[1], media_type="application/json")

    async def _read(self, request: Request, model: type[M], simplify: Simplify | None = None) -> M:
        return await read_json(request, self._frontend.settings.max_body_bytes, model, simplify)

    def _model_of(self, name: str | None) -> TokenizedModel:
        return self._frontend.models.only() if name is None else self._frontend.models.find(name)

    def _model(self, name: str) -> dict[str, object]:
        model = self._frontend.models.find(name)
        return {
            "id": name,
            "object": "model",
            "created": self._frontend.started_s,
            "owned_by": "tandem",
            "root": model.name,
            "max_model_len": self._frontend.reader.context_tokens(model) or None,
        }


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the framework in our shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    path = str(request.scope["path"])  # not of request.url, which a strange Host makes unreadable
    if status == 405:
        what = f"{request.method} is not allowed on {shortened(path)}"
        failure = InvalidRequestError(what, todo="use another method")
    else:
        unknown = InvalidRequestError(f"nothing is served at {shortened(path)}", todo="start with /v1/models")
        failure = absent(path) or unknown
    return error_response(failure, status, headers, path=path)
