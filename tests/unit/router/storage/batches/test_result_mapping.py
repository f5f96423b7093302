"""Replies: which are final, how long is waited after the others, and the lines that stand for them."""

from __future__ import annotations

import json

import orjson
import pytest

from tandem.core.batch import LineError
from tandem.router.storage.batches import result_mapping
from tandem.router.storage.batches.asgi_client import AsgiResponse
from tandem.router.storage.batches.result_mapping import LONGEST_PAUSE_S, MAX_FAILURES, pause_before_retry


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
