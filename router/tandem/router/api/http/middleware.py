"""Layers around the HTTP endpoints: shutdown, authentication, errors as error objects; and the context of a request.

The first two are raw ASGI layers, so that an endpoint added later is guarded too. Caller and trace are in the ASGI
scope, where the layers left them and no client can write. SLO, priority and timeout come from headers and the body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.core import api_keys
from tandem.core.errors import CancelledError, InternalError, InvalidRequestError, TandemError
from tandem.router.admission.slo_classes import ANONYMOUS, Caller, SloRequest
from tandem.router.api.frontend import Frontend, stopping_error
from tandem.router.api.http.errors import error_response
from tandem.router.error_quoting import quoted
from tandem.router.tenancy.authenticator import CALLER, TENANT, Authenticator
from tandem.router.tracing.calls import Call

_log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


def counted(frontend: Frontend, api: str, endpoint: Endpoint) -> Endpoint:
    """Requests wait for their turn to be read. Errors before an answer exists become responses and are counted;
    afterwards the answer counts itself. So it is with the call's trace."""

    async def run(request: Request) -> Response:
        arrived_s = request.scope[ARRIVED] = frontend.clock.now_s()
        call = frontend.begin(api, request.headers.items() if frontend.is_traced else (), arrived_s)
        request.scope[CALL] = call
        names = {} if call is None else call.names
        try:
            await frontend.intake.turn(tenant_of(request))
            return await endpoint(request)
        except TandemError as error:
            frontend.refused(api, error, call)
            closing = {"connection": "close"} if error.code == "request_too_large" else {}
            return error_response(error, headers={**closing, **names}, path=request.scope["path"])
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error object
            failure = _bug(error)
            frontend.refused(api, failure, call)
            return error_response(failure, headers=names, path=request.scope["path"])

    return run


def guarded(endpoint: Endpoint) -> Endpoint:
    """Errors become responses."""

    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TandemError as error:
            headers = {"connection": "close"} if error.code == "request_too_large" else None
            return error_response(error, headers=headers)
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error object
            return error_response(_bug(error))

    return run


def json_response(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def _bug(error: Exception) -> InternalError:
    _log.exception("request failed")
    return InternalError("the router failed", why=type(error).__name__, todo="report this")


OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
_METRICS = "/metrics"


class AuthMiddleware:
    """Checks the key of every request: without a key, where keys are needed, only health and version are answered.
    `on_refused` is called with the error of each that is refused."""

    def __init__(self, app: ASGIApp, gate: Authenticator, on_refused: Callable[[TandemError], None]) -> None:
        self._app, self._gate, self._on_refused = app, gate, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            wanted = api_keys.Scope.METRICS if scope["path"] == _METRICS else api_keys.Scope.INFER
            try:
                caller = self._gate.admit(_key(scope), wanted)
                if not caller.key_id:
                    self._gate.check_name(_header(scope, b"host"))
            except TandemError as error:
                self._on_refused(error)
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
            scope[TENANT], scope[CALLER] = caller.tenant, caller
        await self._app(scope, receive, send)


def _key(scope: Any) -> str | None:
    """The value of Authorization; where there is none, the same of Anthropic's header for a key."""
    given = _header(scope, b"authorization")
    if given is None and (key := _header(scope, b"x-api-key")) is not None:
        return f"Bearer {key}"
    return given


def _header(scope: Any, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value.decode("latin-1"))
    return None


_CLOSE = {"connection": "close"}
_HEARS_S = 5.0
_STILL_OPEN = OPEN_PATHS | {"/metrics"}


class ShutdownMiddleware:
    """Refuses every request that comes while `is_stopping`, but health, with a time to come back. Those that came
    before go on. `on_refused` gets the error.

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
        await error_response(error, headers=_CLOSE, path=scope["path"])(scope, receive, send)

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


SLO_HEADER = "X-SLO-Class"
TIMEOUT_HEADER = "X-Request-Timeout"
CALL = "tandem.call"
"""Under which name the scope holds the call's trace."""
ARRIVED = "tandem.arrived_s"
"""And when the call arrived, on the router's clock."""


def tenant_of(request: Request) -> str:
    """Return the tenant that owns the responses, files and batches that the call may see."""
    return str(request.scope.get(TENANT, ANONYMOUS.tenant))


def caller_of(request: Request) -> Caller:
    """Return the caller that sent the request."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller or Caller(tenant=tenant_of(request))


def call_of(request: Request) -> Call | None:
    """The call's trace; None = it has none."""
    call: Call | None = request.scope.get(CALL)
    return call


def arrived_s_of(request: Request) -> float:
    """Return when the call arrived, on the router's clock: before it waited to be read."""
    arrived_s: float = request.scope[ARRIVED]
    return arrived_s


def wish_of(request: Request, priority: int | None = None, timeout_s: float | None = None) -> SloRequest:
    """SLO class, priority and timeout of the request, from its headers and its body; the body wins."""
    slo, given = header(request, SLO_HEADER.lower()), header(request, TIMEOUT_HEADER.lower())
    if timeout_s is not None or given is None:
        return SloRequest(slo=slo, priority=priority, timeout_s=timeout_s)
    try:
        timeout_s = float(given)
    except ValueError:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {quoted(given)}", why="it must be a number of seconds", param=TIMEOUT_HEADER
        ) from None
    return SloRequest(slo=slo, priority=priority, timeout_s=timeout_s, timeout_param=TIMEOUT_HEADER)


_BY_NAME = "tandem.headers"
"""Under which name the scope holds them."""


def header(request: Request, name: str) -> str | None:
    """As `request.headers.get` of a `name` in lower case: of several of one name the first. All are read once, and not
    looked through each time."""
    found = request.scope.get(_BY_NAME)
    if found is None:
        found = request.scope[_BY_NAME] = dict(reversed(request.scope["headers"]))
    value: bytes | None = found.get(name.encode())
    return None if value is None else value.decode("latin-1")


@contextmanager
def present(request: Request) -> Iterator[None]:
    """End the code inside with CancelledError as soon as the client closes the connection: it may leave before there is
    an answer to send, as while its prompt is tokenised.

    The request's body must have been read: whatever else arrives is not kept.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_gone = False
    watcher: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            continue
        is_gone = True
        task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    beginning = loop.call_soon(begin)  # most works never wait, and need no watcher
    try:
        yield
    except asyncio.CancelledError:
        if is_gone and task.uncancel() == 0:
            raise CancelledError("the client closed the connection") from None
        raise  # ended by another caller
    finally:
        beginning.cancel()
        if watcher is not None:
            watcher.cancel()
