"""The cluster secret on gRPC: every internal call carries a bearer token, every server checks it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.core.secret import METADATA_KEY, ClusterSecret

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)


class SecretInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the cluster's token; health checks are open."""

    def __init__(self, secret: ClusterSecret) -> None:
        self._secret = secret

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        token = ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == METADATA_KEY:
                token = value if isinstance(value, str) else value.decode("ascii", "replace")
        if self._secret.is_rpc_token(token):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret is missing or wrong")


def call_metadata(secret: ClusterSecret) -> tuple[tuple[str, str], ...]:
    """Metadata that proves membership to another worker."""
    return ((METADATA_KEY, secret.rpc_token()),)
