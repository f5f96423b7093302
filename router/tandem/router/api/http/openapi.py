"""The OpenAPI document, made of a table of operations and the schemas; schemathesis holds it against a running server.

A test holds the table against the routes of the application.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem.core.api_keys import LEAST_URGENT, MOST_URGENT
from tandem.core.sampling import MAX_CHOICES, MAX_LOGPROBS
from tandem.core.version import release
from tandem.router.api.http import response_models as d
from tandem.router.api.http import schemas
from tandem.router.api.http.batches_api import BatchRequest
from tandem.router.api.http.files_api import LEAST_EXPIRY_S, LONGEST_EXPIRY_S
from tandem.router.api.http.messages import response_models as m
from tandem.router.api.http.messages import schemas as messages
from tandem.router.api.http.middleware import OPEN_PATHS, SLO_HEADER, TIMEOUT_HEADER
from tandem.router.api.http.responses import response_models as r
from tandem.router.api.http.responses import schemas as responses

_JSON = "application/json"
_EVENTS = "text/event-stream"
_BYTES = "application/octet-stream"
_WHY = {
    400: "Something in the request is wrong; `param` names the field.",
    401: "There is no API key, where keys are needed, or it is not valid.",
    403: "The API key does not allow this.",
    404: "There is no such model, response, file or batch.",
    405: "The path is served, this method is not.",
    413: "The body is longer than `router.max_body_bytes`.",
    415: "The body is in another form.",
    429: "Too many for this key, class or queue; `Retry-After` says when to try again.",
    499: "The client left, or reads too slowly.",
    500: "A bug of the router.",
    502: "A worker or a transfer was lost, and no other took over.",
    503: "No worker can take it now; `Retry-After` says when to try again.",
    504: "The deadline passed: the request's own, or `router.request_timeout_s`.",
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""The headers that an API key may come in."""
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
    "max_output_tokens": {"minimum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 2},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "priority": {"minimum": MOST_URGENT, "maximum": LEAST_URGENT},
    "timeout": {"exclusiveMinimum": 0},
}
"""Bounds that are checked after the schema, where errors can name another field than pydantic would."""
UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "contentMediaType": _BYTES},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_EXPIRY_S, "maximum": LONGEST_EXPIRY_S},
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}
"""The form of an upload."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One path with one method. `neutral`: parameters that are known, and the values of them that ask for nothing.

    `event`: what is in an event of the answer where it is streamed. `error`: the shape of its errors. `query`: schemas
    of query parameters. `form`: the body is this form, not JSON. `plain`: media type of an answer that is no JSON.
    `errors`: those that do not follow from the rest. `leads`: by the name of another operation, its parameter that the
    `id` of this one's answer is for. `examples`: bodies by what they show, without their `model`.
    """

    method: str
    path: str
    name: str
    summary: str
    _: KW_ONLY
    body: type[BaseModel] | None = None
    form: Mapping[str, Any] | None = None
    answer: type[BaseModel] | None = None
    plain: str = ""
    event: type[BaseModel] | None = None
    error: type[BaseModel] = d.Error
    errors: tuple[int, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] | None = None
    query: Mapping[str, Mapping[str, Any]] | None = None
    leads: Mapping[str, str] | None = None
    examples: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def path_names(self) -> list[str]:
        """Names of the parameters in the path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]

    @property
    def statuses(self) -> list[int]:
        """Statuses of its errors, ascending."""
        found = {405, 500, *self.errors}
        found |= {401, 403, 503} if self.path not in OPEN_PATHS else set()
        found |= {400, 404, 413, 415, 499, 504} if self.body is not None else set()
        found |= {429, 502} if self.event is not None else set()
        found |= {400} if self.query is not None else set()
        return sorted(found | ({404} if self.path_names else set()))


def _page(largest: int, **more: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    after = {"type": "string", "description": "The last id of the page before."}
    return {"limit": {"type": "integer", "minimum": 1, "maximum": largest}, "after": after, **more}


def _examples(everything: Mapping[str, Any] | None = None, **body: Any) -> dict[str, dict[str, Any]]:
    """The same request whole and streamed, and with all that an answer can show."""
    streamed = {**body, "stream": True}
    if everything is None:
        return {"whole": body, "streamed": streamed}
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {"whole": body, "streamed": streamed,
            "everything": {**streamed, **everything, "stream_options": options, "n": 2}}  # fmt: skip


_HELLO = {"role": "user", "content": "Hello"}
_ORDER = {"type": "string", "enum": ["asc", "desc"]}
_RESPONSE, _FILE, _BATCH = "/v1/responses/{response_id}", "/v1/files/{file_id}", "/v1/batches/{batch_id}"

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "createChatCompletion", "An answer to a chat, whole or streamed",
        body=schemas.ChatRequest, answer=d.ChatCompletion, event=d.ChatCompletionChunk, neutral=schemas.NEUTRAL_CHAT,
        examples=_examples({"logprobs": True, "top_logprobs": 2}, messages=[_HELLO], max_tokens=16),
    ),
    Operation(
        "post", "/v1/completions", "createCompletion", "Texts that go on with prompts, whole or streamed",
        body=schemas.CompletionRequest, answer=d.Completion, event=d.CompletionChunk,
        neutral=schemas.NEUTRAL_COMPLETION,
        examples=_examples({"logprobs": 2, "return_token_ids": True}, prompt="Once upon a time", max_tokens=16),
    ),
    Operation(
        "post", "/v1/messages", "createMessage", "A message that answers a conversation, whole or streamed",
        body=messages.MessagesRequest, answer=m.MessageObject, event=m.MessageEvent, error=m.AnthropicError,
        neutral=messages.NEUTRAL, examples=_examples(messages=[_HELLO], max_tokens=16),
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "countTokens", "The number of tokens of a conversation",
        body=messages.CountTokensRequest, answer=m.TokenCount, error=m.AnthropicError, neutral=messages.NEUTRAL,
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Token ids of a text or a chat", body=schemas.TokenizeRequest, answer=d.Tokens
    ),
    Operation(
        "post", "/detokenize", "detokenize", "The text of token ids", body=schemas.DetokenizeRequest, answer=d.Text
    ),
    Operation("get", "/v1/models", "listModels", "Every name under which a model is served", answer=d.ModelList),
    Operation("get", "/v1/models/{model}", "retrieveModel", "One of them", answer=d.ModelObject),
    Operation(
        "post", "/v1/responses", "createResponse", "An answer that can be continued by its id, whole or streamed",
        body=responses.ResponseRequest, answer=r.ResponseObject, event=r.ResponseEvent, neutral=responses.NEUTRAL,
        examples=_examples(input="Hello", max_output_tokens=16),
        leads={
            "retrieveResponse": "response_id", "listInputItems": "response_id", "deleteResponse": "response_id",
            "createResponse": "previous_response_id",
        },
    ),
    Operation("get", _RESPONSE, "retrieveResponse", "A stored response", answer=r.ResponseObject, errors=(400,)),
    Operation("delete", _RESPONSE, "deleteResponse", "It is forgotten", answer=r.DeletedResponse),
    Operation(
        "get", f"{_RESPONSE}/input_items", "listInputItems", "What the response answered", answer=r.InputItemList,
        query=_page(100, order=_ORDER),
    ),
    Operation(
        "post", f"{_RESPONSE}/cancel", "cancelResponse",
        "Refused: only responses in the background can be cancelled", errors=(400,),
    ),
    Operation(
        "post", "/v1/files", "createFile", "Upload a file", form=UPLOAD, answer=d.FileObject,
        errors=(400, 413, 415, 499, 504),
        leads={
            "retrieveFile": "file_id", "retrieveFileContent": "file_id", "deleteFile": "file_id",
            "createBatch": "input_file_id",
        },
    ),
    Operation(
        "get", "/v1/files", "listFiles", "The files, newest first", answer=d.FileList,
        query=_page(10_000, order=_ORDER, purpose={"type": "string"}),
    ),
    Operation("get", _FILE, "retrieveFile", "What is known of a file", answer=d.FileObject),
    Operation("delete", _FILE, "deleteFile", "It is removed", answer=d.DeletedFile),
    Operation("get", f"{_FILE}/content", "retrieveFileContent", "The bytes of a file", plain=_BYTES),
    Operation(
        "post", "/v1/batches", "createBatch", "Have the requests of a file run, within a day", body=BatchRequest,
        answer=d.BatchObject, leads={"retrieveBatch": "batch_id", "cancelBatch": "batch_id"},
    ),
    Operation("get", "/v1/batches", "listBatches", "The batches, newest first", answer=d.BatchList, query=_page(100)),
    Operation("get", _BATCH, "retrieveBatch", "A batch", answer=d.BatchObject),
    Operation("post", f"{_BATCH}/cancel", "cancelBatch", "Run no more of its requests", answer=d.BatchObject),
    Operation("get", "/livez", "livez", "Whether the router runs", answer=d.Liveness),
    Operation("get", "/readyz", "readyz", "Whether some model can be served now", answer=d.ReadinessModel),
    Operation("get", "/health", "health", "The same as /readyz", answer=d.ReadinessModel),
    Operation("get", "/version", "version", "Which version of Tandem runs", answer=d.VersionModel),
    Operation("get", "/metrics", "metrics", "Metrics in the text format of Prometheus", plain="text/plain"),
    Operation("get", "/openapi.json", "openapi", "This document"),
)  # fmt: skip


def document(
    served_names: Sequence[str], served_paths: Container[str], slo_classes: Sequence[str] = ()
) -> dict[str, Any]:
    """The whole document, as plain JSON values; `served_names` are what `model` may be, other paths are left out.

    `slo_classes` are what requests may name.
    """
    operations = {one.name: one for one in OPERATIONS if one.path in served_paths}
    used = {model for one in operations.values() for model in (one.error, one.body, one.answer, one.event) if model}
    _, definitions = models_json_schema(
        [(model, "validation") for model in sorted(used, key=lambda model: model.__name__)],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = definitions["$defs"]
    paths: dict[str, Any] = {}
    for one in operations.values():
        paths.setdefault(one.path, {})[one.method] = operation = _operation(one, operations, slo_classes)
        if one.body is not None:
            schema = components[one.body.__name__]
            _complete(schema, one.neutral or {})
            _name_models(schema["properties"].get("model", {}), served_names)
        if one.examples is not None:
            operation["requestBody"]["content"][_JSON]["examples"] = {
                shows: {"value": {"model": served_names[0], **body}} for shows, body in one.examples.items()
            }
    about = {
        "title": "Tandem",
        "version": release(),
        "description": "OpenAI-compatible text generation. Parameters that are not listed are refused by name.",
    }
    return {
        "openapi": "3.1.0",
        "info": about,
        "security": [{"key": []}, {"x-api-key": []}, {}],  # a cluster without any key needs none
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _KEYS},
    }


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


def _operation(one: Operation, names: Mapping[str, Operation], slo_classes: Sequence[str]) -> dict[str, Any]:
    answers: dict[str, Any] = {
        str(status): {"description": _WHY[status], "content": {_JSON: {"schema": _ref(one.error)}}}
        for status in one.statuses
    }
    content = _content(one)
    if one.answer is not None or one.plain or one.name == "openapi":
        answers["200"] = {"description": one.summary, "content": content}
    if one.leads:
        links = {name: _link(names[name], field) for name, field in one.leads.items() if name in names}
        answers["200"]["links"] = links
    if one.plain == _BYTES:
        answers["206"] = {"description": "The part that was asked for.", "content": content}
    if one.answer is d.ReadinessModel:
        answers["503"] = {"description": "No model can be served now; `missing` says why.", "content": content}
    body: dict[str, Any] = {"operationId": one.name, "summary": one.summary, "responses": answers}
    if one.path in OPEN_PATHS:
        body["security"] = []
    if one.form is not None:
        body["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": one.form}}}
    elif one.body is not None:
        body["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(one.body)}}}
    if parameters := _parameters(one, slo_classes):
        body["parameters"] = parameters
    return body


def _parameters(one: Operation, slo_classes: Sequence[str]) -> list[dict[str, Any]]:
    headers: dict[str, dict[str, Any]] = {}
    if one.event is not None:  # it generates
        headers[TIMEOUT_HEADER] = {"type": "number", "exclusiveMinimum": 0, "description": "Seconds."}
        if slo_classes:
            headers[SLO_HEADER] = {"type": "string", "enum": list(slo_classes)}
    text = {"type": "string"}
    in_path = [{"name": name, "in": "path", "required": True, "schema": text} for name in one.path_names]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in (one.query or {}).items()]
    return [*in_path, *in_query, *({"name": name, "in": "header", "schema": how} for name, how in headers.items())]


def _link(target: Operation, field: str) -> dict[str, Any]:
    """Link the answer's id to its use: a part of the target's path, or a field of its body."""
    where = "parameters" if field in target.path_names else "requestBody"
    return {"operationId": target.name, where: {field: "$response.body#/id"}}


def _content(one: Operation) -> dict[str, Any]:
    if one.plain:
        return {one.plain: {"schema": {"type": "string"}}}
    if one.answer is None:
        return {_JSON: {"schema": {"type": "object"}}}
    content: dict[str, Any] = {_JSON: {"schema": _ref(one.answer)}}
    if one.event is not None:
        content[_EVENTS] = {"itemSchema": _event(one.event, one.error)}
    return content


def _event(model: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event. Streams of chunks end with [DONE], whatever came before; those of responses and of messages
    do not."""
    content = {"anyOf": [_ref(model), _ref(error)]}
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": content}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
