"""The OpenAPI document against the application's routes and against what the schemas accept."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.routing import Route

from tandem.core.errors import STATUS, UnsupportedParameterError
from tandem.router.http import schemas
from tandem.router.http.app import create_app
from tandem.router.http.openapi import OPERATIONS, document

DOCUMENT = document(("a", "b"))
SCHEMAS = DOCUMENT["components"]["schemas"]
CHAT = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}


def test_it_has_every_route_and_no_other() -> None:
    door: Any = SimpleNamespace()
    routes = {
        (re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path), method.lower())
        for route in create_app(door).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods} == routes


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
            "internal", "unavailable", "worker_lost", "transfer_failed", "deadline_exceeded", "cancelled"}  # fmt: skip
    assert {str(STATUS[code][0]) for code in ours} <= set(chat["responses"])
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


@pytest.mark.parametrize("name", sorted(schemas.NEUTRAL_CHAT))
def test_what_asks_for_nothing_is_documented_as_it_is_taken(name: str) -> None:
    documented = SCHEMAS["ChatRequest"]["properties"][name]["enum"]
    for value in documented:
        schemas.ChatRequest.model_validate(schemas.without_neutral_chat({**CHAT, name: value}))
    with pytest.raises((UnsupportedParameterError, ValidationError)):
        schemas.ChatRequest.model_validate(schemas.without_neutral_chat({**CHAT, name: ["something", "else"]}))
