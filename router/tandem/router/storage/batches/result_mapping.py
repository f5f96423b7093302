"""Maps a reply to a request of a batch: final, or to be tried again; and to its line in one of the two output files:
answers, and errors. Every request stands in one of them, once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import orjson

from tandem.core.batch import BatchRecord, LineError
from tandem.core.errors import InternalError
from tandem.router.storage.batches import state_machine
from tandem.router.storage.batches.asgi_client import AsgiResponse
from tandem.router.storage.batches.file_store import FilesFolder
from tandem.router.storage.batches.input_file import Input, custom_ids
from tandem.router.storage.batches.journal import JournalEntry, ResultLocation

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


class Outputs:
    """Writes them for one batch that ends, in the order of its input."""

    def __init__(self, folder: FilesFolder, record: BatchRecord, places: Mapping[int, ResultLocation]) -> None:
        self._folder, self._record, self._places = folder, record, places

    def write(self, found: Input, output: str, errors: str) -> tuple[int, int]:
        """Write both under these ids; returns their sizes. Blocks; raises OSError, also when an answer is gone."""
        left_over = state_machine.left_over(self._record)
        with ExitStack() as stack:
            good = stack.enter_context(self._folder.writing(output))
            bad = stack.enter_context(self._folder.writing(errors))
            reader = _Results(stack)
            for number, custom_id in custom_ids(self._folder.input(self._record.id), found):
                place = self._places.get(number)
                if place is None:
                    bad.write(unanswered_line(number, self._record.id, custom_id, left_over) + b"\n")
                else:
                    (good if place.is_ok else bad).write(reader.read(place) + b"\n")
            return good.size_bytes, bad.size_bytes


class _Results:
    """Reads answers from the segments of a journal, each of which is opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._segments: dict[str, int] = {}

    def read(self, place: ResultLocation) -> bytes:
        name = str(place.segment)
        if name not in self._segments:
            self._segments[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._segments[name])
        result = os.pread(self._segments[name], place.size, place.offset)
        if len(result) != place.size:
            raise OSError(f"an answer in {place.segment.name} is no longer there")
        return result
