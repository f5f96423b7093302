"""In front of the HTTP application: a router that stops answers nothing but health, and says when to come back."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.core.errors import TandemError
from tandem.router.http.errors import error_response
from tandem.router.http.guard import OPEN_PATHS
from tandem.router.stopping import stopping_error

_CLOSE = {"connection": "close"}
_STILL_OPEN = OPEN_PATHS | {"/metrics"}


class Parting:
    """Refuses every request that comes while `is_stopping`; those that came before go on. `on_refused` is told."""

    def __init__(
        self, app: ASGIApp, is_stopping: Callable[[], bool], on_refused: Callable[[TandemError], None]
    ) -> None:
        self._app, self._is_stopping, self._on_refused = app, is_stopping, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_stopping() and scope["path"] not in _STILL_OPEN:
            error = stopping_error()
            self._on_refused(error)
            await error_response(error, headers=_CLOSE)(scope, receive, send)
            return
        await self._app(scope, receive, send)
