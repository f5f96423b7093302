"""Refuses HTTP requests while the router stops: all but health get an error with a time to come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.core.errors import TandemError
from tandem.router.api.frontend import stopping_error
from tandem.router.api.http.auth_middleware import OPEN_PATHS
from tandem.router.api.http.errors import error_response

_CLOSE = {"connection": "close"}
_HEARS_S = 5.0
_STILL_OPEN = OPEN_PATHS | {"/metrics"}


class ShutdownMiddleware:
    """Refuses every request that comes while `is_stopping`; those that came before go on. `on_refused` gets the error.

    `refusing`: how many are being refused now. A stop does not wait for them, else one slow upload after the
    other would make it last.
    """

    def __init__(
        self, app: ASGIApp, is_stopping: Callable[[], bool], on_refused: Callable[[TandemError], None]
    ) -> None:
        self._app, self._is_stopping, self._on_refused = app, is_stopping, on_refused
        self._hearing: set[asyncio.Timeout] = set()
        self._hears_s = _HEARS_S
        self.refusing = 0

    def stop_reading_bodies(self) -> None:
        """Answer all requests that are being refused at once, whatever they still send."""
        self._hears_s = 0.0
        for limit in self._hearing:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_stopping() and scope["path"] not in _STILL_OPEN:
            self.refusing += 1
            try:
                await self._refuse(scope, receive, send)
            finally:
                self.refusing -= 1
            return
        await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = stopping_error()
        self._on_refused(error)
        await self._hear_out(scope, receive)
        await error_response(error, headers=_CLOSE)(scope, receive, send)

    async def _hear_out(self, scope: Scope, receive: Receive) -> None:
        """Take the request's body and drop it, for some seconds at most: a connection closed before its end is reset,
        and the client may never read why. A client that waits to be asked for the body is not asked."""
        if any(name == b"expect" for name, _ in scope["headers"]):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hears_s) as limit:
                self._hearing.add(limit)
                try:
                    while (await receive()).get("more_body", False):
                        continue
                finally:
                    self._hearing.discard(limit)
