"""Test input files of batches, results and the client of the ASGI app."""

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tandem.core.batch import LineError
from tandem.router.admission.slo_classes import Caller
from tandem.router.api.http.middleware import caller_of, tenant_of
from tandem.router.storage.batches import result_mapping
from tandem.router.storage.batches.asgi_client import AsgiResponse, InProcess
from tandem.router.storage.batches.input_file import (
    MAX_ERRORS,
    Input,
    Limits,
    body_of,
    custom_id_of,
    custom_ids,
    index_input,
    line_at,
    read_input,
)
from tandem.router.storage.batches.result_mapping import LONGEST_PAUSE_S, MAX_FAILURES, pause_before_retry

URL = "/v1/completions"
LIMITS = Limits(max_requests=500, max_line_bytes=4000)


def line(custom_id: Any = "a", **changes: Any) -> str:
    body = {"model": "m", "prompt": "Hi"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body, **changes})


def deep(levels: int) -> str:
    """A line with a body that is nested deeper than it can be written again."""
    return line(body={"model": "m", "metadata": None}).replace("null", "[" * levels + "]" * levels)


def read(folder: Path, text: str, limits: Limits = LIMITS) -> Input:
    path = folder / "input"
    path.write_text(text)
    return asyncio.run(read_input(path, URL, frozenset({"m", "n"}), limits))


def test_a_good_input(tmp_path: Path) -> None:
    lines = [line(f"id-{n}", body={"model": "m", "prompt": [n]}) for n in range(200)]
    text = "\n".join(lines[:100]) + "\n\n   \r\n" + "\r\n".join(lines[100:])
    found = read(tmp_path, text)
    assert not found.errors
    assert (found.total, found.model) == (200, "m")
    for number in (0, 99, 100, 199):
        one = asyncio.run(line_at(tmp_path / "input", found, number))
        assert custom_id_of(one) == f"id-{number}"
        assert json.loads(body_of(one)) == {"model": "m", "prompt": [number]}
    assert list(custom_ids(tmp_path / "input", found)) == [(n, f"id-{n}") for n in range(200)]
    assert asyncio.run(index_input(tmp_path / "input")).offsets == found.offsets


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[1]", "invalid_json_line", None),
        (line(None), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 4000, body={}), "request_too_large", None),
        (line(7), "invalid_custom_id", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "mismatched_url", "url"),
        (line(body=[]), "invalid_body", "body"),
        (line(body={"model": "other"}), "model_not_found", "body.model"),
        (line(body={}), "model_not_found", "body.model"),
        (deep(300), "invalid_body", "body"),
        (deep(1020), "invalid_body", "body"),
        (line(body={"model": "m", "stream": True}), "unsupported_parameter", "body.stream"),
        (line(more=1), "unknown_parameter", "more"),
    ],
)
def test_what_is_wrong_and_where(tmp_path: Path, wrong: str, code: str, param: str | None) -> None:
    found = read(tmp_path, f"{line('first')}\n\n{wrong}\n")
    assert [(error.line, error.code, error.param) for error in found.errors] == [(3, code, param)]
    assert found.errors[0].message.endswith(".")


def test_models_differ(tmp_path: Path) -> None:
    found = read(tmp_path, line("a") + "\n" + line("b", body={"model": "n"}))
    assert not found.errors
    assert found.model is None


@pytest.mark.parametrize("text", ["", "\n\n", "  "])
def test_nothing_in_it(tmp_path: Path, text: str) -> None:
    assert [error.code for error in read(tmp_path, text).errors] == ["empty_file"]


def test_too_many(tmp_path: Path) -> None:
    text = "\n".join(line(str(n)) for n in range(4))
    assert not read(tmp_path, text, Limits(max_requests=4, max_line_bytes=400)).errors
    (error,) = read(tmp_path, text, Limits(max_requests=3, max_line_bytes=400)).errors
    assert (error.code, error.line) == ("too_many_requests", 4)


def test_errors_are_bounded_and_the_index_is_not(tmp_path: Path) -> None:
    assert len(read(tmp_path, "{\n" * 400).errors) == MAX_ERRORS
    assert asyncio.run(index_input(tmp_path / "input")).total == 400


@pytest.mark.parametrize("status", [200, 400, 404, 413])
def test_final(status: int) -> None:
    assert pause_before_retry(AsgiResponse(status=status), 5, 0) is None


@pytest.mark.parametrize("status", [429, 503])
def test_waiting_has_no_end_of_its_own(status: int) -> None:
    pauses = [pause_before_retry(AsgiResponse(status=status), waits, 0) for waits in range(1, 100)]
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    told = AsgiResponse(status=status, headers={"retry-after": "7"})
    assert pause_before_retry(told, 1, 0) == 7.0
    assert pause_before_retry(AsgiResponse(status=status, headers={"retry-after": "99999"}), 1, 0) == LONGEST_PAUSE_S
    assert pause_before_retry(AsgiResponse(status=status, headers={"retry-after": "soon"}), 1, 0) == 0.5


@pytest.mark.parametrize("status", [499, 500, 502, 504])
def test_what_breaks_is_tried_again_a_few_times(status: int) -> None:
    pauses = [pause_before_retry(AsgiResponse(status=status), 0, failures) for failures in range(1, MAX_FAILURES + 1)]
    assert pauses == [0.5, 1.0, None]


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
        {"input_tokens": 9, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 8}},
    ],
)
def test_an_answer(usage: dict[str, object]) -> None:
    body = {"id": "x", "text": "a\nb", "usage": usage}
    reply = AsgiResponse(status=200, headers={"x-request-id": "cmpl-1"}, body=orjson.dumps(body))
    entry = result_mapping.entry(3, "batch_1", "mine", reply)
    assert (entry.number, entry.is_ok) == (3, True)
    assert (entry.input_tokens, entry.cached_tokens, entry.output_tokens) == (9, 8, 4)
    assert b"\n" not in entry.result
    assert json.loads(entry.result) == {
        "id": result_mapping.request_id("batch_1", 3),
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": body},
        "error": None,
    }


def test_a_refusal() -> None:
    error = {"error": {"message": "No.", "type": "invalid_request_error", "param": "x", "code": "invalid_request"}}
    entry = result_mapping.entry(0, "batch_1", "mine", AsgiResponse(status=400, body=orjson.dumps(error)))
    assert not entry.is_ok
    assert entry.output_tokens == 0
    assert json.loads(entry.result)["response"] == {"status_code": 400, "request_id": "", "body": error}


def test_what_was_never_answered() -> None:
    line = result_mapping.unanswered_line(2, "batch_1", "mine", LineError(code="batch_expired", message="Too late."))
    assert json.loads(line) == {
        "id": result_mapping.request_id("batch_1", 2),
        "custom_id": "mine",
        "response": None,
        "error": {"code": "batch_expired", "message": "Too late."},
    }


def test_ids_are_stable_and_apart() -> None:
    ids = {result_mapping.request_id(batch, number) for batch in ("batch_1", "batch_2") for number in range(100)}
    assert len(ids) == 200
    assert result_mapping.request_id("batch_1", 5) == result_mapping.request_id("batch_1", 5)


def test_a_call_says_whose_it_is_and_that_no_client_waits() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        seen.extend((caller_of(request), tenant_of(request), request.url.path, await request.body()))
        await JSONResponse({"is": "here"}, 418, {"X-Way": "back"})(scope, receive, send)

    reply = asyncio.run(InProcess(app).post("/v1/completions", b"{}", "acme"))
    assert seen == [Caller(tenant="acme", is_background=True), "acme", "/v1/completions", b"{}"]
    assert (reply.status, reply.headers["x-way"], reply.body) == (418, "back", b'{"is":"here"}')
