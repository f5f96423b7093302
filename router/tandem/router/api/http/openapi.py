"""The OpenAPI document, made of the operations and the schemas; schemathesis holds it against a running server."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tandem.core.api_keys import LEAST_URGENT, MOST_URGENT
from tandem.core.sampling import MAX_CHOICES, MAX_LOGPROBS
from tandem.router.api.http import response_models as d
from tandem.router.api.http.auth_context import SLO_HEADER, TIMEOUT_HEADER
from tandem.router.api.http.auth_middleware import OPEN_PATHS
from tandem.router.api.http.operations import OPERATIONS, Operation
from tandem.router.version import version

_JSON = "application/json"
_EVENTS = "text/event-stream"
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
    503: "Nobody can take it now; `Retry-After` says when to try again.",
    504: "The deadline passed: the request's own, or `router.request_timeout_s`.",
}
_ALWAYS = (405, 500)
_GUARDED = (401, 403, 503)
"""Statuses of every path that needs a key, or is refused while the router stops."""
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


def document(
    served_names: Sequence[str], served_paths: Container[str], slo_classes: Sequence[str] = ()
) -> dict[str, Any]:
    """The whole document, as plain JSON values; `served_names` are what `model` may be, other paths are left out.

    `slo_classes` are what requests may name.
    """
    operations = [one for one in OPERATIONS if one.path in served_paths]
    used: dict[type[BaseModel], None] = {d.Error: None}
    for one in operations:
        used |= {model: None for model in (one.body, one.answer, one.event) if model is not None}
    _, definitions = models_json_schema(
        [(model, "validation") for model in used],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = definitions["$defs"]
    for one in operations:
        if one.body is not None:
            schema = components[one.body.__name__]
            _complete(schema, one.neutral or {})
            _name_models(schema["properties"].get("model", {}), served_names)
    names = {one.name: one for one in operations}
    paths: dict[str, Any] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = operation = _operation(one, names, slo_classes)
        if one.examples is not None:
            operation["requestBody"]["content"][_JSON]["examples"] = {
                shows: {"value": {"model": served_names[0], **body}} for shows, body in one.examples.items()
            }
    about = {
        "title": "Tandem",
        "version": version(),
        "description": "OpenAI-compatible text generation. Parameters that are not listed are refused by name.",
    }
    return {
        "openapi": "3.1.0",
        "info": about,
        "security": [{"key": []}, {}],  # a cluster without any key needs none
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
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
    success: dict[str, Any] = {"description": one.summary, "content": _content(one)}
    if one.leads:
        success["links"] = {name: _link(names[name], field) for name, field in one.leads.items() if name in names}
    answers: dict[str, Any] = {}
    if one.answer is not None or one.plain or one.name == "openapi":
        answers["200"] = success
    if one.is_ranged:
        answers["206"] = {"description": "The part that was asked for.", "content": _content(one)}
    if one.not_ready:
        answers["503"] = {"description": "No model can be served now; `missing` says why.", "content": _content(one)}
    is_open = one.path in OPEN_PATHS
    for status in sorted({*_ALWAYS, *one.errors, *(() if is_open else _GUARDED)}):
        answers[str(status)] = {"description": _WHY[status], "content": {_JSON: {"schema": _ref(d.Error)}}}
    body: dict[str, Any] = {"operationId": one.name, "summary": one.summary, "responses": answers}
    if is_open:
        body["security"] = []
    if one.form is not None:
        body["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": one.form}}}
    elif one.body is not None:
        body["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(one.body)}}}
    if parameters := _parameters(one, slo_classes):
        body["parameters"] = parameters
    return body


def _parameters(one: Operation, slo_classes: Sequence[str]) -> list[dict[str, Any]]:
    text = {"type": "string"}
    in_path = [{"name": name, "in": "path", "required": True, "schema": text} for name in _path_names(one)]
    in_query = [{"name": name, "in": "query", "schema": schema} for name, schema in (one.query or {}).items()]
    headers: dict[str, dict[str, Any]] = {}
    if one.event is not None:  # it generates
        headers[TIMEOUT_HEADER] = {"type": "number", "exclusiveMinimum": 0, "description": "Seconds."}
    if one.event is not None and slo_classes:
        headers[SLO_HEADER] = {"type": "string", "enum": list(slo_classes)}
    in_headers = [{"name": name, "in": "header", "schema": schema} for name, schema in headers.items()]
    return [*in_path, *in_query, *in_headers]


def _path_names(one: Operation) -> list[str]:
    return [part[1:-1] for part in one.path.split("/") if part.startswith("{")]


def _link(target: Operation, field: str) -> dict[str, Any]:
    """Link the answer's id to its use: a part of the target's path, or a field of its body."""
    value = {field: "$response.body#/id"}
    where = "parameters" if field in _path_names(target) else "requestBody"
    return {"operationId": target.name, where: value}


def _content(one: Operation) -> dict[str, Any]:
    if one.plain:
        return {one.plain: {"schema": {"type": "string"}}}
    if one.answer is None:
        return {_JSON: {"schema": {"type": "object"}}}
    content: dict[str, Any] = {_JSON: {"schema": _ref(one.answer)}}
    if one.event is not None:
        content[_EVENTS] = {"itemSchema": _event(one.event)}
    return content


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event. Streams of chunks end with [DONE], whatever came before; those of responses do not."""
    content = {"anyOf": [_ref(model), _ref(d.Error)]}
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": content}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
