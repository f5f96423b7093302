"""Every path of the HTTP API with its method: its input, its answers, and the errors that it may answer with.

A test holds this list against the routes of the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tandem.router.api.http import response_models as d
from tandem.router.api.http import response_models_storage as k
from tandem.router.api.http import response_models_streams as e
from tandem.router.api.http import schemas
from tandem.router.api.http.batches_api import BatchRequest
from tandem.router.api.http.files_api import LEAST_EXPIRY_S, LONGEST_EXPIRY_S
from tandem.router.api.http.responses import schemas as responses

_READS_BODY = (400, 404, 413, 415, 499, 504)
_GENERATES = (429, 502, 503)
_KEPT = (404, 503)

UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": LEAST_EXPIRY_S, "maximum": LONGEST_EXPIRY_S},
    },
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
}
"""The form of an upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One path with one method. `neutral`: parameters that are known, and the values of them that ask for nothing.

    `event`: what is in an event of the answer where it is streamed. `query`: schemas of query parameters. `form`: the
    body is this form, not JSON. `plain`: media type of an answer that is no JSON, which `is_ranged` when clients may
    ask for a part of it. `leads`: by the name of another operation, its parameter that the `id` of this one's answer
    is for. `examples`: bodies by what they show, without their `model`.
    """

    method: str
    path: str
    name: str
    summary: str
    body: type[BaseModel] | None = None
    form: Mapping[str, Any] | None = None
    answer: type[BaseModel] | None = None
    plain: str = ""
    event: type[BaseModel] | None = None
    is_ranged: bool = False
    errors: tuple[int, ...] = ()
    not_ready: bool = False
    neutral: Mapping[str, tuple[Any, ...]] | None = None
    query: Mapping[str, Mapping[str, Any]] | None = None
    leads: Mapping[str, str] | None = None
    examples: Mapping[str, Mapping[str, Any]] | None = None


def _post(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation(method="post", path=path, name=name, summary=summary, **more)


def _reading(path: str, name: str, summary: str, **more: Any) -> Operation:
    more["errors"] = (*_READS_BODY, *more.pop("errors", ()))
    return _post(path, name, summary, **more)


def _get(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation(method="get", path=path, name=name, summary=summary, **more)


def _delete(path: str, name: str, summary: str, **more: Any) -> Operation:
    return Operation(method="delete", path=path, name=name, summary=summary, **more)


def _page(largest: int, *, is_ordered: bool = True) -> dict[str, dict[str, Any]]:
    query: dict[str, dict[str, Any]] = {
        "limit": {"type": "integer", "minimum": 1, "maximum": largest},
        "after": {"type": "string", "description": "The last id of the page before."},
    }
    return {**query, "order": {"type": "string", "enum": ["asc", "desc"]}} if is_ordered else query


def _shown(**body: Any) -> dict[str, dict[str, Any]]:
    """The same request whole and streamed."""
    return {"whole": body, "streamed": {**body, "stream": True}}


def _with_usage(examples: dict[str, dict[str, Any]], **logprobs: Any) -> dict[str, dict[str, Any]]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {**examples, "everything": {**examples["streamed"], **logprobs, "stream_options": options, "n": 2}}


_HELLO = {"role": "user", "content": "Hello"}
_RESPONSE, _FILE, _BATCH = "/v1/responses/{response_id}", "/v1/files/{file_id}", "/v1/batches/{batch_id}"

OPERATIONS = (
    _reading(
        "/v1/chat/completions", "createChatCompletion", "An answer to a chat, whole or streamed",
        body=schemas.ChatRequest, answer=d.ChatCompletion, event=e.ChatCompletionChunk,
        errors=_GENERATES, neutral=schemas.NEUTRAL_CHAT,
        examples=_with_usage(_shown(messages=[_HELLO], max_tokens=16), logprobs=True, top_logprobs=2),
    ),
    _reading(
        "/v1/completions", "createCompletion", "Texts that go on with prompts, whole or streamed",
        body=schemas.CompletionRequest, answer=d.Completion, event=e.CompletionChunk,
        errors=_GENERATES, neutral=schemas.NEUTRAL_COMPLETION,
        examples=_with_usage(_shown(prompt="Once upon a time", max_tokens=16), logprobs=2, return_token_ids=True),
    ),
    _reading("/tokenize", "tokenize", "Token ids of a text or a chat", body=schemas.TokenizeRequest, answer=d.Tokens),
    _reading("/detokenize", "detokenize", "The text of token ids", body=schemas.DetokenizeRequest, answer=d.Text),
    _get("/v1/models", "listModels", "Every name under which a model is served", answer=d.ModelList),
    _get("/v1/models/{model}", "retrieveModel", "One of them", answer=d.ModelObject, errors=(404,)),
    _reading(
        "/v1/responses", "createResponse", "An answer that can be continued by its id, whole or streamed",
        body=responses.ResponseRequest, answer=k.ResponseObject, event=e.ResponseEvent, errors=_GENERATES,
        neutral=responses.NEUTRAL, examples=_shown(input="Hello", max_output_tokens=16),
        leads={
            "retrieveResponse": "response_id", "listInputItems": "response_id", "deleteResponse": "response_id",
            "createResponse": "previous_response_id",
        },
    ),
    _get(_RESPONSE, "retrieveResponse", "A stored response", answer=k.ResponseObject, errors=(400, *_KEPT)),
    _delete(_RESPONSE, "deleteResponse", "It is forgotten", answer=k.DeletedResponse, errors=_KEPT),
    _get(
        f"{_RESPONSE}/input_items", "listInputItems", "What the response answered", answer=k.InputItemList,
        errors=(400, *_KEPT), query=_page(100),
    ),
    _post(
        f"{_RESPONSE}/cancel", "cancelResponse", "Refused: only responses in the background can be cancelled",
        errors=(400, *_KEPT),
    ),
    _post(
        "/v1/files", "createFile", "Upload a file", form=UPLOAD, answer=k.FileObject,
        errors=(400, 413, 415, 499, 503, 504),
        leads={
            "retrieveFile": "file_id", "retrieveFileContent": "file_id", "deleteFile": "file_id",
            "createBatch": "input_file_id",
        },
    ),
    _get(
        "/v1/files", "listFiles", "The files, newest first", answer=k.FileList, errors=(400, 503),
        query={**_page(10_000), "purpose": {"type": "string"}},
    ),
    _get(_FILE, "retrieveFile", "What is known of a file", answer=k.FileObject, errors=_KEPT),
    _delete(_FILE, "deleteFile", "It is removed", answer=k.DeletedFile, errors=_KEPT),
    _get(
        f"{_FILE}/content", "retrieveFileContent", "The bytes of a file", plain="application/octet-stream",
        is_ranged=True, errors=_KEPT,
    ),
    _reading(
        "/v1/batches", "createBatch", "Have the requests of a file run, within a day", body=BatchRequest,
        answer=k.BatchObject, errors=(503,), leads={"retrieveBatch": "batch_id", "cancelBatch": "batch_id"},
    ),
    _get(
        "/v1/batches", "listBatches", "The batches, newest first", answer=k.BatchList, errors=(400, 503),
        query=_page(100, is_ordered=False),
    ),
    _get(_BATCH, "retrieveBatch", "A batch", answer=k.BatchObject, errors=_KEPT),
    _post(f"{_BATCH}/cancel", "cancelBatch", "Run no more of its requests", answer=k.BatchObject, errors=_KEPT),
    _get("/livez", "livez", "Whether the router runs", answer=d.Liveness),
    _get("/readyz", "readyz", "Whether some model can be served now", answer=d.ReadinessModel, not_ready=True),
    _get("/health", "health", "The same as /readyz", answer=d.ReadinessModel, not_ready=True),
    _get("/version", "version", "Which version of Tandem runs", answer=d.VersionModel),
    _get("/metrics", "metrics", "Metrics in the text format of Prometheus", plain="text/plain"),
    _get("/openapi.json", "openapi", "This document"),
)  # fmt: skip
