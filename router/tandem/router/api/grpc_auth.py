"""In front of the gRPC services: checks the key before a message is read, and counts a message's fields and values
before it is decoded. Health and reflection need no key, and are limited to few calls at a time."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from tandem.core.api_keys import Scope
from tandem.core.errors import STATUS, CapacityError, InvalidRequestError, TandemError
from tandem.router.api.frontend import Frontend
from tandem.router.api.http.body_parser import LEAST_VALUE_BYTES

MAX_CALLS = 8192
"""Concurrent calls over all connections of a process."""
MAX_STREAMS = 1024
"""Concurrent calls on one connection; a client holds more of them back."""
MAX_OPEN_STREAMS = 64
"""Concurrent calls that need no key."""
MAX_FIELDS = 40_960
"""Fields of a message and of those inside it, as they are on the wire: 8192 chat messages of three parts each."""
_OPEN = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
_ENDS = bytes(range(0x80, 0x100))
Texts = list[tuple[str, str]]


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a key, unread, where one is needed, and oversized messages, undecoded: those of more
    fields or values than MAX_FIELDS and the largest message allow. `traced`: methods with a trace of their own for
    each call."""

    def __init__(self, frontend: Frontend, messages: Mapping[str, Descriptor], traced: Iterable[str] = ()) -> None:
        self._frontend, self._messages, self._traced = frontend, messages, frozenset(traced)
        self._most_values = int(frontend.settings.max_body_bytes / LEAST_VALUE_BYTES)
        self._open_streams = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        if method.startswith(_OPEN):
            return self._counted(await continuation(handler_call_details))
        try:
            self._frontend.gate.admit(authorization(texts(handler_call_details.invocation_metadata)), Scope.INFER)
        except TandemError as error:
            return grpc.stream_stream_rpc_method_handler(functools.partial(_freed, self._refuse, error, method))
        handler = await continuation(handler_call_details)
        message = self._messages.get(method)
        return handler if handler is None or message is None else self._bounded(handler, message)

    def _bounded(self, handler: Any, message: Descriptor) -> Any:
        """Report why a message cannot be decoded: the library would report only that it failed."""
        decode, kind = handler.request_deserializer, "unary_stream" if handler.unary_stream else "unary_unary"
        behaviour = getattr(handler, kind)

        def read(raw: bytes) -> Any:
            try:
                check_wire(raw, message, self._most_values)
                return decode(raw)
            except InvalidRequestError as error:
                return error.with_traceback(None)  # its frames hold the message
            except DecodeError:
                return InvalidRequestError("the message cannot be decoded", why=f"it is not a {message.name}")

        async def run(request: Any, context: Any) -> Any:
            if not isinstance(request, TandemError):
                return await behaviour(request, context)
            self._frontend.refused("grpc", request)
            return await abort(context, request)

        return handler._replace(request_deserializer=read, **{kind: functools.partial(_freed, run)})

    def _counted(self, handler: Any) -> Any:
        if handler is None or handler.unary_unary:
            return handler  # it is over at once
        kind = "stream_stream" if handler.stream_stream else "unary_stream"
        behaviour = getattr(handler, kind)
        if self._open_streams >= MAX_OPEN_STREAMS:
            why = f"{MAX_OPEN_STREAMS} calls without a key are open"
            error = CapacityError("too many calls", why=why, todo="try again later")
            return grpc.stream_stream_rpc_method_handler(functools.partial(_freed, self._refuse, error, ""))
        if inspect.isasyncgenfunction(behaviour):

            async def answers(request: Any, context: Any) -> Any:
                with self._open():
                    async for answer in behaviour(request, context):
                        yield answer

            return handler._replace(**{kind: answers})

        async def run(request: Any, context: Any) -> Any:
            with self._open():
                return await behaviour(request, context)

        return handler._replace(**{kind: run})

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._open_streams += 1
        try:
            yield
        finally:
            self._open_streams -= 1

    async def _refuse(self, error: TandemError, method: str, _requests: Any, context: Any) -> None:
        frontend, call = self._frontend, None
        if method in self._traced:
            call = frontend.begin("grpc", texts(context.invocation_metadata()), frontend.clock.now_s())
        if call is not None:
            await context.send_initial_metadata(tuple(call.names.items()))
        frontend.refused("grpc", error, call)
        await abort(context, error)


async def _freed(behaviour: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Await `behaviour(*arguments)`; the frames of its error keep no locals.

    gRPC keeps the error that ends a call with the call: frames that hold call and message would be a cycle.
    """
    try:
        return await behaviour(*arguments)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del behaviour, arguments


def check_wire(raw: bytes, message: Descriptor, most_values: int) -> None:
    """Raise InvalidRequestError for a message with more than MAX_FIELDS fields on the wire, or more numbers in its
    lists than `most_values`. What is broken is left to the decoder."""
    fields = values = 0
    spans = [(0, len(raw), message)]
    while spans:
        at, end, kind = spans.pop()
        inside, packed = _known(kind)
        try:
            while at < end:
                fields += 1
                if fields > MAX_FIELDS:
                    raise InvalidRequestError(
                        "the message has too many fields", why=f"at most {MAX_FIELDS} are allowed"
                    )
                tag, at = _varint(raw, at)
                wire = tag & 7
                if wire == 2:
                    size, at = _varint(raw, at)
                    if tag >> 3 in inside:
                        spans.append((at, min(at + size, end), inside[tag >> 3]))
                    elif tag >> 3 in packed:
                        values += len(raw[at : at + size].translate(None, _ENDS))
                        if values > most_values:
                            why = f"at most {most_values} are allowed"
                            raise InvalidRequestError("the message has too many values", why=why)
                    at += size
                elif wire == 0:
                    _, at = _varint(raw, at)
                elif wire in (1, 5):
                    at += 8 if wire == 1 else 4
                elif wire in (6, 7):
                    break
        except IndexError:  # it ends too early
            continue


@functools.cache
def _known(kind: Descriptor) -> tuple[dict[int, Descriptor], frozenset[int]]:
    """Of a message's fields by number: what those that are messages are, and which are lists of whole numbers."""
    inside = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
    packed = {field.number for field in kind.fields if field.is_repeated and field.type == FieldDescriptor.TYPE_UINT32}
    return inside, frozenset(packed)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends; IndexError at the end of `raw`."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at + 1
        shift += 7


def authorization(given: Texts) -> str | None:
    """As over HTTP, in the metadata `authorization`."""
    found = [value for key, value in given if key == "authorization"]
    return found[0] if found else None


def texts(metadata: Iterable[Any] | None) -> Texts:
    """A call's metadata without what is binary."""
    return [(key, value) for key, value in metadata or () if isinstance(value, str)]


async def abort(context: Any, error: TandemError) -> None:
    """End a call with the status of `error`, its code and the field that it names. Drops the traceback of `error`."""
    status = getattr(grpc.StatusCode, STATUS[error.code][1])
    trailing = [("tandem-code", error.code)]
    if error.param:
        trailing.append(("tandem-param", error.param))
    if error.retryable and error.retry_after_s is not None:
        trailing.append(("grpc-retry-pushback-ms", str(math.ceil(1000 * error.retry_after_s))))
    message = error.message
    error.__traceback__ = error.__cause__ = error.__context__ = None
    await context.abort(status, message, trailing_metadata=tuple(trailing))
