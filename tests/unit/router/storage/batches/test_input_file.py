"""Errors of an input, with their line; and requests found again by number."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

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
