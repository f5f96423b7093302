"""The OpenAPI document against the application's routes and against what the schemas accept."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.routing import Route

from tandem.core.errors import STATUS, UnsupportedParameterError
from tandem.core.output_format_names import ReasoningField
from tandem.router.api.http import schemas
from tandem.router.api.http.app import create_app, paths_of
from tandem.router.api.http.batches_api import add_batches
from tandem.router.api.http.files_api import add_files
from tandem.router.api.http.openapi import OPERATIONS, Operation, document
from tandem.router.api.http.responses import schemas as responses
from tandem.router.api.http.responses_api import add_responses

DOCUMENT = document(("a", "b"), {one.path for one in OPERATIONS}, ("fast",))
SCHEMAS = DOCUMENT["components"]["schemas"]
CHAT = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}


def app(*, keeps: bool) -> FastAPI:
    """The application; `keeps` = with everything that clients may leave with the cluster."""
    limits = SimpleNamespace(max_body_bytes=1, max_file_bytes=1, reasoning_field=ReasoningField.REASONING)
    nothing: Any = SimpleNamespace(settings=limits, limits=limits)
    made = create_app(nothing)
    if keeps:
        add_responses(made, nothing, nothing, 1)
        add_files(made, nothing)
        add_batches(made, nothing, nothing, 1)
    return made


def test_it_has_every_route_and_no_other() -> None:
    routes = {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method.lower())
        for route in app(keeps=True).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods} == routes


def test_what_is_not_served_is_not_in_it() -> None:
    smaller = document(("a",), paths_of(app(keeps=False)))
    assert "/v1/models/{model}" in smaller["paths"]
    assert "/v1/files" not in smaller["paths"]
    assert "FileObject" not in smaller["components"]["schemas"]
    assert "X-SLO-Class" not in json.dumps(smaller)


def test_ids_lead_to_operations_that_take_them() -> None:
    operations = {
        operation["operationId"]: (path, operation)
        for path, methods in DOCUMENT["paths"].items()
        for operation in methods.values()
    }
    leads = {}
    for name, (_, operation) in operations.items():
        for target, link in operation["responses"].get("200", {}).get("links", {}).items():
            path, to = operations[target]
            for field in link.get("parameters", ()):
                assert f"{{{field}}}" in path
            for field in link.get("requestBody", ()):
                reference = to["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert field in SCHEMAS[reference.rpartition("/")[2]]["properties"]
            leads[name, target] = link
    assert ("createFile", "createBatch") in leads
    assert ("createResponse", "createResponse") in leads


def test_it_is_plain_json_without_dangling_references() -> None:
    text = json.dumps(DOCUMENT)
    for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert name in SCHEMAS


def test_every_operation_names_its_models_and_its_errors() -> None:
    assert {one.name for one in OPERATIONS} == {
        operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()
    }
    assert SCHEMAS["ChatRequest"]["properties"]["model"]["enum"] == ["a", "b"]
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]
    ours = {"model_not_found", "invalid_request", "request_too_large", "unsupported_media_type",
            "internal", "unavailable", "invalid_api_key", "insufficient_permissions",
            "worker_lost", "transfer_failed", "deadline_exceeded", "cancelled"}  # fmt: skip
    assert {str(STATUS[code][0]) for code in ours} <= set(chat["responses"])
    assert {one["name"]: one["schema"].get("enum") for one in chat["parameters"]} == {
        "X-Request-Timeout": None, "X-SLO-Class": ["fast"],
    }  # fmt: skip
    health = DOCUMENT["paths"]["/health"]["get"]
    assert health["security"] == []
    assert "401" not in health["responses"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("one", [one for one in OPERATIONS if one.examples], ids=lambda one: one.name)
def test_examples_are_right(one: Operation) -> None:
    body = DOCUMENT["paths"][one.path][one.method]["requestBody"]["content"]["application/json"]
    assert one.body is not None
    for example in body["examples"].values():
        assert one.body.model_validate(example["value"])


@pytest.mark.parametrize("name", sorted(schemas.NEUTRAL_CHAT))
def test_what_asks_for_nothing_is_documented_as_it_is_taken(name: str) -> None:
    documented = SCHEMAS["ChatRequest"]["properties"][name]["enum"]
    for value in documented:
        schemas.ChatRequest.model_validate(schemas.without_neutral_chat({**CHAT, name: value}))
    with pytest.raises((UnsupportedParameterError, ValidationError)):
        schemas.ChatRequest.model_validate(schemas.without_neutral_chat({**CHAT, name: ["something", "else"]}))


@pytest.mark.parametrize("name", sorted(responses.NEUTRAL))
def test_so_is_what_asks_a_response_for_nothing(name: str) -> None:
    body = {"model": "a", "input": "Hi"}
    for value in SCHEMAS["ResponseRequest"]["properties"][name]["enum"]:
        responses.ResponseRequest.model_validate(responses.without_neutral({**body, name: value}))
    with pytest.raises(UnsupportedParameterError):
        responses.without_neutral({**body, name: ["something", "else"]})
