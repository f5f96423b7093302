"""Maps a reply to a request of a batch: final, or to be tried again; and to its line in the output."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from tandem.core.batch import LineError
from tandem.core.errors import InternalError
from tandem.router.storage.batches.asgi_client import AsgiResponse
from tandem.router.storage.batches.journal import JournalEntry

MAX_FAILURES = 3
"""A request on which something broke so often is answered with its error."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
_WAIT = (429, 503)
"""No room, or no worker there: nothing is wrong with the request, so waiting has no end but the batch's. A quota is
another thing: there, trying again does not help."""


def pause_before_retry(reply: AsgiResponse, waits: int, failures: int) -> float | None:
    """Seconds to wait before the same request is sent again; None = the reply is its answer.

    `waits` and `failures` count the replies of either kind so far, this one included.
    """
    if is_waiting(reply):
        return _pause(reply, waits)
    if reply.status >= 499 and failures < MAX_FAILURES:
        return _pause(reply, failures)
    return None


def broken() -> AsgiResponse:
    """In place of the reply to a request that raised an error of ours."""
    error = InternalError("the request could not be run", why="there is a fault in the server")
    said = {"message": error.message, "type": "server_error", "param": None, "code": error.code}
    return AsgiResponse(status=500, body=orjson.dumps({"error": said}))


def is_waiting(reply: AsgiResponse) -> bool:
    return reply.status in _WAIT and reply.headers.get("x-should-retry") != "false"


def entry(number: int, batch: str, custom_id: str, reply: AsgiResponse) -> JournalEntry:
    """Return the journal entry of a final reply."""
    usage = _usage(reply.body) if reply.status == 200 else {}
    response = {
        "status_code": reply.status,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": orjson.Fragment(reply.body),
    }
    line = {"id": request_id(batch, number), "custom_id": custom_id, "response": response, "error": None}
    return JournalEntry(
        number=number,
        is_ok=reply.status == 200,
        result=orjson.dumps(line),
        input_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        cached_tokens=_cached(usage),
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
    )


def unanswered_line(number: int, batch: str, custom_id: str, error: LineError) -> bytes:
    """The line for a request that the batch ended before."""
    said = {"code": error.code, "message": error.message}
    return orjson.dumps({"id": request_id(batch, number), "custom_id": custom_id, "response": None, "error": said})


def request_id(batch: str, number: int) -> str:
    """The same for the same request, however often it was tried."""
    return "batch_req_" + hashlib.sha256(f"{batch}:{number}".encode()).hexdigest()[:24]


def _pause(reply: AsgiResponse, tries: int) -> float:
    given = reply.headers.get("retry-after", "")
    least_s = float(given) if given.isdigit() and len(given) < 6 else 0.0
    return min(LONGEST_PAUSE_S, max(least_s, FIRST_PAUSE_S * 2.0 ** min(tries - 1, 10)))


def _usage(body: bytes) -> Mapping[str, Any]:
    usage = orjson.loads(body).get("usage")
    return usage if isinstance(usage, dict) else {}


def _count(usage: Mapping[str, Any], *names: str) -> int:
    return next((int(usage[name]) for name in names if usage.get(name)), 0)


def _cached(usage: Mapping[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)
