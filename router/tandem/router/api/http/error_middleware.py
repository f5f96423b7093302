"""Wraps every endpoint: errors become error objects, and the ones before an answer exists are counted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tandem.core.errors import InternalError, TandemError
from tandem.router.api.frontend import Frontend
from tandem.router.api.http.auth_context import ARRIVED, CALL, tenant_of
from tandem.router.api.http.errors import error_response

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
            return error_response(error, headers={**closing, **names})
        except Exception as error:  # noqa: BLE001 - a bug must reach the client as an error object
            failure = _bug(error)
            frontend.refused(api, failure, call)
            return error_response(failure, headers=names)

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
