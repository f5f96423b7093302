"""The cluster secret on the worker's gRPC port: every internal call carries a proof, and is answered with one.

Health checks are open. There are few of them at a time, and each has little time to send its request: until it has,
gRPC may hold a message of any size that other calls are allowed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from tandem.core.call_proof import CONTROL, PROOF_KEY, ProofChecker, Refused, stream_target, value_of
from tandem.core.secret import ClusterSecret

_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
MAX_CHECKS, MAX_WATCHES = 8, 32
CHECK_S = 2.0
MAX_CALLS = 4096
"""Limit of one worker at a time, of all kinds: a stream each of routers and peers, and control calls."""


class Named(Protocol):
    """The identity of a worker; its WorkerInfo is one."""

    @property
    def worker(self) -> str: ...
    @property
    def incarnation(self) -> int: ...


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a proof for this worker before reading a message of theirs; answers the others with one."""

    def __init__(self, secret: ClusterSecret, me: Callable[[], Named]) -> None:
        self._checker, self._me = ProofChecker(secret), me
        self._checks, self._watches = asyncio.Semaphore(MAX_CHECKS), asyncio.Semaphore(MAX_WATCHES)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        if method in (_CHECK, _WATCH):
            return self._open(method, await continuation(handler_call_details))
        line = value_of(handler_call_details.invocation_metadata, PROOF_KEY)
        me = self._me()
        target = me.worker if method == CONTROL else stream_target(me.worker, me.incarnation)
        refusal = self._checker.refusal(line, method, target)
        if refusal is None:
            return _answering(await continuation(handler_call_details), self._checker.answer(line))
        if refusal.kind is Refused.STRANGER:
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, refusal.why)
        is_order = method == CONTROL and refusal.kind is Refused.ELSEWHERE
        return _refusing(grpc.StatusCode.NOT_FOUND if is_order else grpc.StatusCode.FAILED_PRECONDITION, refusal.why)

    def _open(self, method: str, handler: Any) -> Any:
        """A handler of a health check that reads its message here, for a bounded time."""
        if handler is None:
            return None
        to_bytes = handler.response_serializer
        if method == _WATCH:
            watch = functools.partial(self._limited, self._watches, f"{MAX_WATCHES} watches", handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(watch, None, to_bytes)
        check = functools.partial(self._limited, self._checks, f"{MAX_CHECKS} checks", handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(check, None, to_bytes)

    async def _limited(
        self, limit: asyncio.Semaphore, most: str, call: Any, requests: AsyncIterator[bytes], context: Any
    ) -> Any:
        if limit.locked():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {most} at a time")
        async with limit:
            return await call(await _asked(requests, context), context)


async def _asked(requests: AsyncIterator[bytes], context: Any) -> health_pb2.HealthCheckRequest:
    try:
        async with asyncio.timeout(CHECK_S):
            data = await anext(requests, b"")
        return health_pb2.HealthCheckRequest.FromString(data)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request did not arrive within {CHECK_S:g} s")
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a health check")
    raise AssertionError("an aborted call goes on")


def _answering(handler: Any, answer: tuple[tuple[str, str], ...]) -> Any:
    """The same handler, behind the server's own proof. It writes with `context.write`, so no message takes longer."""
    if handler is None:
        return None
    inner = handler.stream_stream or handler.unary_unary

    async def proven(asked: Any, context: Any) -> Any:
        await context.send_initial_metadata(answer)
        return await inner(asked, context)

    make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_unary_rpc_method_handler
    return make(proven, handler.request_deserializer, handler.response_serializer)


def _refusing(code: grpc.StatusCode, why: str) -> Any:
    async def refuse(_requests: Any, context: Any) -> None:
        await context.abort(code, why)

    return grpc.stream_stream_rpc_method_handler(refuse)
