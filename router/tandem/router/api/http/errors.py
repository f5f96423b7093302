"""Errors as clients expect them: one nested object, the same in responses and inside streams.

Paths of the Messages API have Anthropic's shape, all others OpenAI's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

from tandem.core.errors import STATUS, InvalidRequestError, TandemError, UnsupportedParameterError
from tandem.core.ids import new_request_id
from tandem.router.error_quoting import quoted, shortened

RETRY_AFTER_S = 1
_SHAPES = {
    "input": "it must be a text or a list of items",
    "prompt": "it must be a text, a list of texts, a list of token ids or a list of lists of token ids",
    "stop": "it must be a text or a list of texts",
}
"""Allowed values of fields that take several types; pydantic would name one of them."""
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip
MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of an error by which Anthropic's SDK knows that it has to send whole conversations."""
_RETRIED = (408, 409, 429)
"""Statuses that the OpenAI SDK retries by itself, beside 500 and above."""


def http_status(error: TandemError) -> int:
    return STATUS[error.code][0]


def error_object(error: TandemError, status: int | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    status = http_status(error) if status is None else status
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")
    if error.code in ("model_not_found", "unsupported_endpoint"):
        kind = "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def is_anthropic(path: str) -> bool:
    """True if clients of `path` read Anthropic's shapes."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error_object(error: TandemError, status: int, request: str) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}, "request_id"}`, with `details` that the SDK acts upon."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": error.message}
    if isinstance(error, UnsupportedParameterError) and error.param == "thread":
        body["details"] = _NO_THREADS
    return {"type": "error", "error": body, "request_id": request}


def error_response(
    error: TandemError, status: int | None = None, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> Response:
    """The whole response to a request for `path`, with Retry-After where waiting helps, and for the SDKs of OpenAI and
    Anthropic whether to try again at all."""
    status = http_status(error) if status is None else status
    extra = dict(headers or {}) | retry_headers(error, status)
    if status == 401:
        extra.setdefault("www-authenticate", "Bearer")
    body = error_body(error, status)
    if is_anthropic(path):
        request = extra["request-id"] = extra.get("x-request-id") or new_request_id("req")
        body = orjson.dumps(anthropic_error_object(error, status, request))
    return Response(body, status_code=status, headers=extra, media_type="application/json")


def error_body(error: TandemError, status: int) -> bytes:
    return orjson.dumps(error_object(error, status))


def retry_headers(error: TandemError, status: int) -> dict[str, str]:
    """Retry-After and retry-after-ms, as computed where the error arose; `x-should-retry: false` where the SDK would
    try again for nothing."""
    if error.retryable:
        after_s = RETRY_AFTER_S if error.retry_after_s is None else max(0.001, error.retry_after_s)
        seconds, millis = math.ceil(after_s), math.ceil(1000 * after_s)
        return {"retry-after": str(seconds), "retry-after-ms": str(millis), "x-should-retry": "true"}
    return {"x-should-retry": "false"} if status >= 500 or status in _RETRIED else {}


def error_event(error: TandemError, path: str, request: str) -> bytes:
    """The last event of a stream of `path` that failed; `request` is the answer's id."""
    if is_anthropic(path):
        body = anthropic_error_object(error, http_status(error), request)
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
    return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


def from_validation(error: ValidationError, data: Any) -> InvalidRequestError:
    """The first field that pydantic complains about, by the path that the client wrote; a field of an object in a list
    rather than the list, which may also be a text."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = _path(problems[0], data)
    inside = (
        one for one in problems if _path(one, data).startswith(f"{first}[") and "]." in _path(one, data)[len(first) :]
    )
    problem = next(inside, problems[0])
    kind, param = problem["type"], _path(problem, data)
    if kind == "extra_forbidden":
        todo = "remove it or correct its name"
        return InvalidRequestError(f"unknown parameter {quoted(param)}", todo=todo, param=param)
    messages = dict.fromkeys(problem["msg"] for problem in problems if _path(problem, data) == param)
    why = " or ".join(message[:1].lower() + message[1:] for message in list(messages)[:3])
    if kind != "missing":
        why = _SHAPES.get(param, why)
    return InvalidRequestError(f"{param or 'the request body'} is wrong", why=why, param=param or None)


def _path(problem: Any, data: Any) -> str:
    """`("messages", 0, "user", "content")` as `messages[0].content`: names of union members are no part of a path."""
    path = ""
    location = problem["loc"]
    for position, part in enumerate(location):
        if isinstance(part, int):
            if isinstance(data, list) and 0 <= part < len(data):
                path, data = f"{path}[{part}]", data[part]
            continue
        is_missing = problem["type"] == "missing" and position == len(location) - 1
        if isinstance(data, dict) and (part in data or is_missing):
            name = shortened(part)
            path, data = f"{path}.{name}" if path else name, data.get(part)
    return path
