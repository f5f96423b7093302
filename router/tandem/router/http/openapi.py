"""The OpenAPI document: every path of the HTTP API, its parameters, and every status that it can answer with.

A test holds the paths against the application's routes; schemathesis holds the rest against a running server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem.core.sampling import MAX_CHOICES, MAX_LOGPROBS
from tandem.router.http import documented as d
from tandem.router.http import schemas
from tandem.router.version import version

_JSON = "application/json"
_EVENTS = "text/event-stream"
_WHY = {
    400: "Something in the request is wrong; `param` names the field.",
    404: "There is no such model.",
    405: "The path is served, this method is not.",
    413: "The body is longer than `router.max_body_bytes`.",
    415: "The body is no JSON in UTF-8.",
    499: "The client left, or reads too slowly.",
    500: "A bug of the router.",
    502: "A worker or a transfer was lost, and no other took over.",
    503: "Nobody can take it now; `Retry-After` says when to try again.",
    504: "The deadline passed, `router.request_timeout_s`.",
}
_ALWAYS = (405, 500)
_READS_BODY = (400, 404, 413, 415, 499, 504)
_GENERATES = (502, 503)
_BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "best_of": {"minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "max_completion_tokens": {"minimum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
}
"""What is checked behind the schema, where errors can name another field than pydantic would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path with one method. `neutral`: parameters that are known, and the values of them that ask for nothing."""

    method: str
    path: str
    name: str
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    is_streamed: bool = False
    errors: tuple[int, ...] = ()
    not_ready: bool = False
    neutral: Mapping[str, tuple[Any, ...]] | None = None


def _post(path: str, name: str, summary: str, **more: Any) -> Operation:
    more["errors"] = (*_READS_BODY, *more.pop("errors", ()))
    return Operation(method="post", path=path, name=name, summary=summary, **more)


def _get(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation(method="get", path=path, name=name, summary=summary, **more)


OPERATIONS = (
    _post(
        "/v1/chat/completions", "createChatCompletion", "An answer to a chat, whole or streamed", is_streamed=True,
        body=schemas.ChatRequest, answer=d.ChatCompletion, errors=_GENERATES, neutral=schemas.NEUTRAL_CHAT,
    ),
    _post(
        "/v1/completions", "createCompletion", "Texts that go on with prompts, whole or streamed", is_streamed=True,
        body=schemas.CompletionRequest, answer=d.Completion, errors=_GENERATES, neutral=schemas.NEUTRAL_COMPLETION,
    ),
    _post("/tokenize", "tokenize", "Token ids of a text or a chat", body=schemas.TokenizeRequest, answer=d.Tokens),
    _post("/detokenize", "detokenize", "The text of token ids", body=schemas.DetokenizeRequest, answer=d.Text),
    _get("/v1/models", "listModels", "Every name under which a model is served", answer=d.ModelList),
    _get("/v1/models/{model}", "retrieveModel", "One of them", answer=d.ModelObject, errors=(404,)),
    _get("/livez", "livez", "Whether the router runs", answer=d.Liveness),
    _get("/readyz", "readyz", "Whether some model can be served now", answer=d.Readiness, not_ready=True),
    _get("/health", "health", "The same as /readyz", answer=d.Readiness, not_ready=True),
    _get("/version", "version", "Which version of Tandem runs", answer=d.Version),
    _get("/metrics", "metrics", "Metrics in the text format of Prometheus"),
    _get("/openapi.json", "openapi", "This document"),
)  # fmt: skip


def document(served_names: Sequence[str]) -> dict[str, Any]:
    """The whole document, as plain JSON values; `served_names` are what `model` may be."""
    used: dict[type[BaseModel], None] = {d.Error: None}
    for one in OPERATIONS:
        used |= {model: None for model in (one.body, one.answer) if model is not None}
    _, definitions = models_json_schema(
        [(model, "validation") for model in used],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = definitions["$defs"]
    for one in OPERATIONS:
        if one.body is not None:
            _complete(components[one.body.__name__], one.neutral or {})
            _name_models(components[one.body.__name__]["properties"]["model"], served_names)
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one)
    about = {
        "title": "Tandem",
        "version": version(),
        "description": "OpenAI-compatible text generation. Parameters that are not listed are refused by name.",
    }
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": components}}


def _complete(schema: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    properties: dict[str, Any] = schema["properties"]
    for name, bounds in _BOUNDS.items():
        for one in properties.get(name, {}).get("anyOf", ()):
            if one.get("type") in ("integer", "number"):
                one.update(bounds)
    for name, values in neutral.items():
        note = "Known, not supported: only these values, which ask for nothing."
        properties[name] = {"enum": list(values), "description": note}


def _name_models(schema: dict[str, Any], served_names: Sequence[str]) -> None:
    """In a schema of one text, or of one or null."""
    for one in (schema, *schema.get("anyOf", ())):
        if one.get("type") == "string":
            one["enum"] = list(served_names)


def _operation(one: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": one.summary, "content": _content(one)}}
    if one.not_ready:
        answers["503"] = {"description": "No model can be served now; `missing` says why.", "content": _content(one)}
    for status in sorted({*_ALWAYS, *one.errors}):
        answers[str(status)] = {"description": _WHY[status], "content": {_JSON: {"schema": _ref(d.Error)}}}
    body: dict[str, Any] = {"operationId": one.name, "summary": one.summary, "responses": answers}
    if one.body is not None:
        body["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(one.body)}}}
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    if names:
        body["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return body


def _content(one: Operation) -> dict[str, Any]:
    if one.answer is None:
        kind = "text/plain" if one.path == "/metrics" else _JSON
        return {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    content: dict[str, Any] = {_JSON: {"schema": _ref(one.answer)}}
    if one.is_streamed:
        content[_EVENTS] = {"schema": {"type": "string", "description": "Server-sent events, the last one [DONE]."}}
    return content


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
