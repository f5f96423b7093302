"""Authenticates HTTP requests: without a key, where keys are needed, only health and version are answered.

A raw ASGI layer, so that an endpoint added later is guarded too. Endpoints find the caller in auth_context.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.core import api_keys
from tandem.core.errors import TandemError
from tandem.router.api.http.errors import error_response
from tandem.router.tenancy.asgi_scope import CALLER, TENANT
from tandem.router.tenancy.authenticator import Authenticator

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
_METRICS = "/metrics"


class AuthMiddleware:
    """Checks the key of every request; `on_refused` is called with the error of each that is refused."""

    def __init__(self, app: ASGIApp, gate: Authenticator, on_refused: Callable[[TandemError], None]) -> None:
        self._app, self._gate, self._on_refused = app, gate, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            wanted = api_keys.Scope.METRICS if scope["path"] == _METRICS else api_keys.Scope.INFER
            try:
                caller = self._gate.admit(_header(scope, b"authorization"), wanted)
                if not caller.key_id:
                    self._gate.check_name(_header(scope, b"host"))
            except TandemError as error:
                self._on_refused(error)
                await error_response(error)(scope, receive, send)
                return
            scope[TENANT], scope[CALLER] = caller.tenant, caller
        await self._app(scope, receive, send)


def _header(scope: Any, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value.decode("latin-1"))
    return None
