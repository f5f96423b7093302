"""docs/api.md against the code: every parameter is in its tables, and the tests that it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tandem.router.api.http import schemas
from tandem.router.api.http.batches_api import BatchRequest
from tandem.router.api.http.operations import UPLOAD
from tandem.router.api.http.responses.schemas import ResponseRequest
from tandem.rpc.v1 import inference_pb2 as i

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "api.md").read_text()
PARAMETERS, TESTED = TEXT.partition("## Parameters")[2].split("## What tests each parameter")
BODIES: tuple[type[BaseModel], ...] = (
    schemas.ChatRequest, schemas.CompletionRequest, schemas.StreamOptions, schemas.TokenizeRequest,
    schemas.DetokenizeRequest, schemas.Message, ResponseRequest, BatchRequest,
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    i.GenerateRequest, i.GenerateSampling, i.ChatMessages, i.ChatMessage, i.TokenizeRequest, i.DetokenizeRequest,
)  # fmt: skip


def rows() -> Iterator[tuple[set[str], str, str]]:
    """Names of parameters, what tests them over HTTP, and over gRPC."""
    for line in TESTED.splitlines():
        if line.startswith("| ") and "::" in line:
            names, http, rpc = line.strip("|").split("|")
            yield set(re.findall(r"`([\w-]+)`", names)), http.strip(), rpc.strip()


def http_names() -> set[str]:
    names = {name for body in BODIES for name in body.model_fields}
    return names | {name.partition("[")[0] for name in UPLOAD["properties"]}


def rpc_names() -> set[str]:
    return {field.name for message in MESSAGES for field in message.DESCRIPTOR.fields}


def test_every_parameter_is_tested() -> None:
    assert http_names() - {name for names, http, _ in rows() if http for name in names} == set()
    assert rpc_names() - {name for names, _, rpc in rows() if rpc for name in names} == set()


def test_no_parameter_is_made_up() -> None:
    named = {name for row in rows() for name in row[0]}
    assert {name for name in named if not name.startswith("X-")} <= http_names() | rpc_names()


@pytest.mark.parametrize("body", [schemas.ChatRequest, schemas.CompletionRequest])
def test_every_parameter_of_a_generation_is_explained(body: type[BaseModel]) -> None:
    for name in body.model_fields:
        assert f"`{name}`" in PARAMETERS or f"`{name}." in PARAMETERS, name


def test_the_tests_exist() -> None:
    named = set(re.findall(r"`([\w/]+)::(\w+)`", TESTED))
    assert len(named) > 40
    for file, function in named:
        assert function in functions(file), f"{file} has no {function}"


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
