"""The input of a batch: one request a line. Reads it, reports the error of each wrong line, finds a line again."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tandem.core.batch import LineError
from tandem.router.error_quoting import quoted, shortened

MAX_ERRORS = 100
MAX_CUSTOM_ID = 512
_KNOWN = ("custom_id", "method", "url", "body")
_LINES_AT_ONCE = 64
_BYTES_OF_A_TOKEN, _ANSWER_TOKENS = 4, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an input: `max_line_bytes` for one request, `max_requests` for all."""

    max_requests: int
    max_line_bytes: int


@dataclass(slots=True)
class Input:
    """A checked input. `offsets` are where the requests begin in the file, and its end."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    errors: list[LineError] = field(default_factory=list)
    models: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        return len(self.offsets) // 2

    def cost(self, number: int) -> int:
        """Estimated cost of a request, in tokens, from its length."""
        return (self.offsets[2 * number + 1] - self.offsets[2 * number]) // _BYTES_OF_A_TOKEN + _ANSWER_TOKENS

    @property
    def model(self) -> str | None:
        """The model that all requests name, or None."""
        return next(iter(self.models)) if len(self.models) == 1 else None


async def read_input(path: Path, endpoint: str, models: frozenset[str], limits: Limits) -> Input:
    """Check all of it, some lines at a time, off the event loop. Raises OSError."""
    return await _read(_Reader(endpoint, models, limits), path)


async def index_input(path: Path) -> Input:
    """Find the requests of an input that was checked before. Raises OSError."""
    return await _read(_Reader("", frozenset(), None), path)


async def line_at(path: Path, found: Input, number: int) -> bytes:
    """The line of the request `number` of an input that was checked. Raises OSError."""
    start, end = found.offsets[2 * number], found.offsets[2 * number + 1]
    return await asyncio.to_thread(_read_at, path, start, end - start)


def body_of(line: bytes) -> bytes:
    """Return the body that is sent to the endpoint. Raises TypeError for one that cannot be written again."""
    return orjson.dumps(orjson.loads(line)["body"])


def custom_id_of(line: bytes) -> str:
    """Return the client's id for the request of a line that was checked."""
    custom_id: str = orjson.loads(line)["custom_id"]
    return custom_id


def custom_ids(path: Path, found: Input) -> Iterator[tuple[int, str]]:
    """(number, custom_id) of every request, in order. Blocks; raises OSError."""
    with path.open("rb") as stream:
        for number in range(found.total):
            start, end = found.offsets[2 * number], found.offsets[2 * number + 1]
            stream.seek(start)
            yield number, custom_id_of(stream.read(end - start))


class _Reader:
    """Goes through the lines, and remembers every custom_id to find one that comes twice. No limits = no checks."""

    def __init__(self, endpoint: str, models: frozenset[str], limits: Limits | None) -> None:
        self._endpoint, self._models, self._limits = endpoint, models, limits
        self._input = Input()
        self._seen: dict[str, int] = {}
        self._line, self._offset = 0, 0

    def read(self, path: Path) -> bool:
        """Some lines more; False at the end, or when enough is wrong. Raises OSError."""
        with path.open("rb") as stream:
            stream.seek(self._offset)
            return self._read(stream)

    def _read(self, stream: BinaryIO) -> bool:
        limits = self._limits
        for _ in range(_LINES_AT_ONCE):
            line = stream.readline(limits.max_line_bytes + 2 if limits else -1)
            if not line:
                return False
            self._line += 1
            start, self._offset = self._offset, self._offset + len(line)
            text = line.strip()
            if limits and len(text) > limits.max_line_bytes:
                self._wrong("request_too_large", f"the line is longer than {limits.max_line_bytes} bytes")
                return False  # where the next one begins is not known
            if text:
                self._input.offsets.extend((start, start + len(line)))
            if text and limits:
                self._check(text)
            if limits and self._input.total > limits.max_requests:
                self._wrong("too_many_requests", f"there are more than {limits.max_requests} requests")
                return False
            if len(self._input.errors) >= MAX_ERRORS:
                return False
        return True

    def finished(self) -> Input:
        if not self._input.total and not self._input.errors:
            self._input.errors.append(LineError(code="empty_file", message="The input file has no requests."))
        return self._input

    def _check(self, text: bytes) -> None:
        try:
            data = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            self._wrong("invalid_json_line", f"this line is not valid JSON: {error}")
            return
        if not isinstance(data, dict):
            self._wrong("invalid_json_line", "this line must be a JSON object")
            return
        self._check_id(data.get("custom_id"))
        for name in data.keys() - set(_KNOWN):
            self._wrong("unknown_parameter", f"unknown parameter {quoted(name)}", shortened(name))
        if data.get("method") != "POST":
            self._wrong("invalid_method", "method must be POST", "method")
        if data.get("url") != self._endpoint:
            self._wrong("mismatched_url", f"url must be the batch's endpoint {self._endpoint}", "url")
        body = data.get("body")
        if not isinstance(body, dict):
            self._wrong("invalid_body", "body must be an object", "body")
        elif not _is_writable(body):
            self._wrong("invalid_body", "body is nested too deeply to be sent", "body")
        else:
            self._check_body(body)

    def _check_id(self, custom_id: Any) -> None:
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            self._wrong(
                "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters", "custom_id"
            )
            return
        first = self._seen.setdefault(custom_id, self._line)
        if first != self._line:
            what = f"custom_id {quoted(custom_id)} is already in line {first}"
            self._wrong("duplicate_custom_id", what, "custom_id")

    def _check_body(self, body: Mapping[str, Any]) -> None:
        model = body.get("model")
        if not isinstance(model, str) or model not in self._models:
            shown = quoted(model) if isinstance(model, str) else "none"
            served = ", ".join(sorted(self._models))
            self._wrong("model_not_found", f"the model is {shown}, and this cluster serves {served}", "body.model")
        else:
            self._input.models.add(model)
        if body.get("stream"):
            self._wrong("unsupported_parameter", "requests of a batch cannot be streamed", "body.stream")

    def _wrong(self, code: str, message: str, param: str | None = None) -> None:
        text = f"{message[:1].upper()}{message[1:]}."
        self._input.errors.append(LineError(code=code, message=text, line=self._line, param=param))


def _is_writable(body: dict[str, Any]) -> bool:
    """True if it can be sent: orjson reads 1,024 levels and writes 254."""
    try:
        orjson.dumps(body)
        return True
    except TypeError:
        return False


async def _read(reader: _Reader, path: Path) -> Input:
    while await asyncio.to_thread(reader.read, path):
        continue
    return reader.finished()


def _read_at(path: Path, start: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, size, start)
    finally:
        os.close(fd)
