"""Calls of batches to the router's own application."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tandem.router.admission.slo import Caller
from tandem.router.api.http.auth_context import caller_of, tenant_of
from tandem.router.storage.batches.asgi_client import InProcess


def test_a_call_says_whose_it_is_and_that_no_client_waits() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        seen.extend((caller_of(request), tenant_of(request), request.url.path, await request.body()))
        await JSONResponse({"is": "here"}, 418, {"X-Way": "back"})(scope, receive, send)

    reply = asyncio.run(InProcess(app).post("/v1/completions", b"{}", "acme"))
    assert seen == [Caller(tenant="acme", is_background=True), "acme", "/v1/completions", b"{}"]
    assert (reply.status, reply.headers["x-way"], reply.body) == (418, "back", b'{"is":"here"}')
