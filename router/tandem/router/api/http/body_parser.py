"""Reads requests: a bounded body, JSON of bounded entries, a schema.

Entries are counted before the body is parsed, and in each list and object before that is walked. The bounds of lists
and maps are those of the schema (`Field(max_length=…)`), found once for each model. A field that takes several kinds of
list is identified by the first element. Accepted bodies cost pydantic at most one error a list (`FIRST_ERROR`) and a
few an object, however large they are. Bodies of the admin port, which come from operators, have lists without a bound
of their own.
"""

from __future__ import annotations

import asyncio
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tandem.core.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    MediaTypeError,
    RequestTooLargeError,
)
from tandem.router.api.http.errors import from_validation
from tandem.router.api.http.middleware import header
from tandem.router.error_quoting import quoted, shortened

BODY_S = 60.0
LONG_BODY_BYTES = 256 * 1024
"""Bodies at least this long are parsed in a thread: the event loop has other streams to feed."""
_THREAD = ThreadPoolExecutor(1, "parse")
"""One, as threads share the interpreter: more would parse no faster, and hold tens of megabytes for each body."""
_DRAIN_S = 2.0
_DRAIN_FACTOR = 8

M = TypeVar("M", bound=BaseModel)
Simplify = Callable[[Mapping[str, Any]], dict[str, Any]]


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body, at most `limit_bytes` of it; RequestTooLargeError beyond."""
    declared = header(request, "content-length") or ""
    if declared.isdigit() and int(declared) > limit_bytes:
        if int(declared) <= _DRAIN_FACTOR * limit_bytes and header(request, "expect") is None:
            await _drain(request, limit_bytes)
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise CancelledError("the client left while it sent the request")
                part: bytes = message.get("body", b"")
                is_whole = not message.get("more_body", False)
                size += len(part)
                if size > limit_bytes:
                    if not is_whole:
                        await _drain(request, limit_bytes)
                    raise _too_large(limit_bytes)
                parts.append(part)
                if is_whole:
                    return part if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise DeadlineError(f"the request body did not arrive within {BODY_S:g} s", todo="send it again") from None


async def read_json(request: Request, limit_bytes: int, model: type[M], simplify: Simplify | None = None) -> M:
    """The body as `model`; InvalidRequestError names the field that is wrong."""
    _check_media_type(request)
    raw = await read_body(request, limit_bytes)
    if len(raw) < LONG_BODY_BYTES:
        return _parsed(raw, limit_bytes, model, simplify)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, _parsed, raw, limit_bytes, model, simplify)


def _parsed(raw: bytes, limit_bytes: int, model: type[M], simplify: Simplify | None) -> M:
    check_raw(raw, limit_bytes)
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError("the request body is not valid JSON", why=str(error)) from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the request body must be a JSON object", todo="send an object")
    check(data, model)
    try:
        return model.model_validate(simplify(data) if simplify else data)
    except ValidationError as error:
        raise from_validation(error, data) from error


def _check_media_type(request: Request) -> None:
    """Accept JSON in UTF-8 and plain, if the client names a type at all. Web pages of another origin have to name it,
    which they cannot unasked."""
    given = header(request, "content-type")
    if given is None:
        given = "" if is_foreign(request) else "application/json"
    kind, _, options = given.lower().partition(";")
    charset = options.partition("charset=")[2].strip(" \"'") or "utf-8"
    if kind.strip() != "application/json" or charset not in ("utf-8", "utf8"):
        raise MediaTypeError(f"the Content-Type is {quoted(given)}", todo="send application/json", param="content-type")
    encoding = header(request, "content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise MediaTypeError(
            f"the Content-Encoding is {quoted(encoding)}", todo="send the body as it is", param="content-encoding"
        )


def is_foreign(request: Request) -> bool:
    """True if a browser reports that a page of another origin sent this. Clients that are no browsers do not report."""
    site, origin = header(request, "sec-fetch-site"), header(request, "origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != header(request, "host")


async def _drain(request: Request, limit_bytes: int) -> None:
    """Throw away a body that is a little too long, so that the client gets to read the answer."""
    seen = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while seen <= _DRAIN_FACTOR * limit_bytes:
                message = await request.receive()
                seen += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _too_large(limit_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError("the request body is too large", why=f"the limit is {limit_bytes} bytes",
                                todo="send less")  # fmt: skip


USUAL_BYTES = 4 << 20
"""Usual limit of a body; where more is allowed, more entries are, too."""
MAX_CONTAINERS = 24_576
"""Lists and objects of a body: 8192 messages of one part each. In memory each takes up to 250 bytes."""
LEAST_CONTAINER_BYTES = 18
"""Bytes of the body for each of them, but for the first FREE: a message with one part has as many."""
FREE = 4096
MAX_STRINGS = 1 << 17
"""Texts of a body, names of fields among them. In memory each takes about 90 bytes."""
LEAST_TEXT_BYTES = 6
"""Bytes of the body for each of them, but for the first FREE: a part of a message has 6.5 each."""
LEAST_VALUE_BYTES = 16 / 3
"""Bytes of the largest body for each value in it, about 70 bytes of memory while it is parsed: token ids of that body
fit."""
MAX_FIELDS = 128
"""Fields of an object: pydantic makes an error of every field that it does not know."""
_SLICE_BYTES = 1 << 16
_CONTAINERS = (b"{", b"[")

Check = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of a body: lists and objects, quotes of texts, commas between values."""

    containers: int
    quotes: int
    commas: int

    def beyond(self, found: _Counts) -> str:
        """The kind that `found` has too many of, and how many there may be; "" = none."""
        if found.containers > self.containers:
            return f"lists and objects: at most {self.containers} are allowed"
        if found.quotes > self.quotes:
            return f"texts: at most {self.quotes // 2} are allowed"
        return f"values: at most {self.commas} are allowed" if found.commas > self.commas else ""


class _BeyondError(Exception):
    """`place` has grown from the inside out when it arrives at the top."""

    def __init__(self, count: int, most: int, what: str = "entries") -> None:
        super().__init__()
        self.count, self.most, self.what = count, most, what
        self.place = ""

    def at(self, step: str) -> _BeyondError:
        self.place = f"{step}.{self.place}" if self.place and self.place[0] != "[" else f"{step}{self.place}"
        return self


def check_raw(raw: bytes, limit_bytes: int) -> None:
    """Raise InvalidRequestError for JSON with too many lists, objects, texts or values. The limits are those for a body
    of at most `limit_bytes`. The contents of texts are separated from the rest only where all together are too many."""
    times = max(1.0, limit_bytes / USUAL_BYTES)
    containers = min(int(MAX_CONTAINERS * times), FREE + len(raw) // LEAST_CONTAINER_BYTES)
    strings = min(int(MAX_STRINGS * times), FREE + len(raw) // LEAST_TEXT_BYTES)
    most = _Counts(containers, 2 * strings, int(limit_bytes / LEAST_VALUE_BYTES))
    if not most.beyond(_Counts(sum(map(raw.count, _CONTAINERS)), raw.count(b'"'), raw.count(b","))):
        return
    containers = quotes = commas = 0
    for outside, passed in _outside_texts(raw):
        containers, quotes = containers + sum(map(outside.count, _CONTAINERS)), quotes + passed
        commas += outside.count(b",")
        beyond = most.beyond(_Counts(containers, quotes, commas))
        if beyond:
            raise InvalidRequestError(f"the request body has too many {beyond}")


def check(data: Any, model: type[BaseModel]) -> None:
    """Raise InvalidRequestError that names the list, map or object of `data` that has more entries than `model` has
    room for."""
    try:
        _of_model(model)(data)
    except _BeyondError as error:
        raise InvalidRequestError(
            f"{error.place or 'the request body'} has {error.count} {error.what}",
            why=f"at most {error.most} are allowed", param=error.place or None,
        ) from None  # fmt: skip


def unbounded(model: type[BaseModel]) -> list[str]:
    """Fields of `model`, and of the models in it, with a list or map that has no bound of entries."""
    return [
        f"{model.__name__}.{name}"
        for name, field in model.model_fields.items()
        for kind in _kinds(field.annotation, field.metadata)
        for found in _unbounded(kind)
    ] + [place for inner in _models(model) for place in unbounded(inner)]


def _outside_texts(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The bytes outside of texts, some of them at a time, with the number of quotes passed for them."""
    is_inside, held = False, b""
    for start in range(0, len(raw), _SLICE_BYTES):
        part = held + raw[start : start + _SLICE_BYTES]
        odd = (len(part) - len(part.rstrip(b"\\"))) % 2
        part, held = (part[:-1], b"\\") if odd else (part, b"")
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(pieces[is_inside::2]), len(pieces) - 1
        is_inside ^= not len(pieces) % 2


@dataclass(frozen=True, slots=True)
class _Kind:
    """A list, map or object that a field may hold. `most` None = it has no bound. `first`: class of its elements;
    `types`: allowed values of a field `type` of the object, which distinguishes it from others."""

    container: type
    most: int | None
    first: type | None = None
    inner: tuple[_Kind, ...] = ()
    model: type[BaseModel] | None = None
    types: tuple[Any, ...] = ()


def _kinds(kind: Any, metadata: typing.Sequence[Any] = ()) -> tuple[_Kind, ...]:
    """The containers that the type of a field allows."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _kinds(arguments[0], (*metadata, *arguments[1:]))
    if origin in (typing.Union, types.UnionType):
        return tuple(found for one in arguments for found in _kinds(one))
    if origin in (list, dict):
        return (_Kind(origin, _most(metadata), _class_of(arguments[-1]), _kinds(arguments[-1])),)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return (_Kind(dict, MAX_FIELDS, model=kind, types=_types(kind)),)
    return ()


def _types(model: type[BaseModel]) -> tuple[Any, ...]:
    """Of a field `type`, alone or with None."""
    field = model.model_fields.get("type")
    said = () if field is None else (field.annotation, *typing.get_args(field.annotation))
    literals = [value for one in said if typing.get_origin(one) is Literal for value in typing.get_args(one)]
    return (*literals, None) if type(None) in said else tuple(literals)


def _most(metadata: typing.Iterable[Any]) -> int | None:
    """The `max_length` in the metadata of a type, by pydantic's `Field` or as pydantic keeps it."""
    for one in metadata:
        for said in (one, *getattr(one, "metadata", ())):
            if isinstance(getattr(said, "max_length", None), int):
                return int(said.max_length)
    return None


def _class_of(kind: Any) -> type | None:
    """Class of an element as it comes out of JSON; None = anything."""
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    kind = typing.get_origin(kind) or kind
    if not isinstance(kind, type):
        return None
    return dict if issubclass(kind, BaseModel) else kind


@functools.cache
def _of_model(model: type[BaseModel]) -> Check:
    fields = {
        field.alias or name: _check_of(_kinds(field.annotation, field.metadata))
        for name, field in model.model_fields.items()
    }
    nested = [(name, inner) for name, inner in fields.items() if inner is not None]

    def run(value: Any) -> None:
        if len(value) > MAX_FIELDS:
            raise _BeyondError(len(value), MAX_FIELDS, "fields")
        for name, inner in nested:
            found = value.get(name)
            if type(found) in (list, dict):
                try:
                    inner(found)
                except _BeyondError as error:
                    raise error.at(name) from None

    return run


def _check_of(kinds: tuple[_Kind, ...]) -> Check | None:
    """Checks a list or an object against those of `kinds`; of another type it is left to pydantic, which does not walk
    what it cannot take."""
    if not kinds:
        return None
    checks = [(kind, _check_of_one(kind)) for kind in kinds]

    def run(value: Any) -> None:
        found = [(kind, inner) for kind, inner in checks if type(value) is kind.container]
        if len(found) > 1 and type(value) is list and value:
            first = type(value[0])
            found = [one for one in found if one[0].first is first] or [min(found, key=lambda one: one[0].most or 0)]
        elif len(found) > 1 and len(value) > MAX_FIELDS:
            raise _BeyondError(len(value), MAX_FIELDS, "fields")
        elif len(found) > 1:
            found = [one for one in found if type(value) is dict and value.get("type") in one[0].types]
        for _, inner in found[:1]:
            inner(value)

    return run


def _check_of_one(kind: _Kind) -> Check:
    if kind.model is not None:
        return _of_model(kind.model)
    most, inner = kind.most, _check_of(kind.inner)

    def run(value: Any) -> None:
        if most and len(value) > most:  # one that must be empty is refused by name, and pydantic does not walk it
            raise _BeyondError(len(value), most)
        if inner is None:
            return
        places = enumerate(value) if kind.container is list else value.items()
        for place, one in places:
            if type(one) in (list, dict):
                try:
                    inner(one)
                except _BeyondError as error:
                    raise error.at(f"[{place}]" if kind.container is list else shortened(str(place))) from None

    return run


def _unbounded(kind: _Kind) -> Iterator[_Kind]:
    if kind.most is None:
        yield kind
    for one in kind.inner:
        yield from _unbounded(one)


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Those directly in `model`."""
    waiting = [kind for field in model.model_fields.values() for kind in _kinds(field.annotation, field.metadata)]
    while waiting:
        kind = waiting.pop()
        waiting += kind.inner
        if kind.model is not None:
            yield kind.model
