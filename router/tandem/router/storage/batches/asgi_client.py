"""Calls to the router's own HTTP application, without a socket: requests of batches take the way of all others."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from tandem.router.admission.slo_classes import Caller
from tandem.router.tenancy.authenticator import CALLER, TENANT


@dataclass(slots=True)
class AsgiResponse:
    """The response: `headers` with names in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class InProcess:
    """Calls `app` as background work of a tenant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: bytes, tenant: str) -> AsgiResponse:
        """The whole reply to a JSON body. Cancelling it ends the request everywhere, as a client that leaves does."""
        reply = AsgiResponse()
        parts: list[bytes] = []
        is_sent = False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal is_sent
            if is_sent:
                await asyncio.Event().wait()  # the caller stays to the end, or is cancelled
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode().lower(): value.decode() for name, value in message.get("headers", ())}
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_scope(path, len(body), tenant), receive, send)
        reply.body = b"".join(parts)
        return reply


def _scope(path: str, size: int, tenant: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        "client": None,
        "server": None,
        "state": {},
        TENANT: tenant,
        CALLER: Caller(tenant=tenant, is_background=True),
    }
