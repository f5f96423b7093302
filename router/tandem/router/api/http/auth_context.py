"""Caller, trace, SLO, priority and timeout of a request. Caller and trace are read from the ASGI scope, where the
layers around the endpoints left them and no client can write."""

from __future__ import annotations

from starlette.requests import Request

from tandem.core.errors import InvalidRequestError
from tandem.router.admission.slo import ANONYMOUS, Caller, SloRequest
from tandem.router.api.http.headers import header
from tandem.router.error_quoting import quoted
from tandem.router.tenancy.asgi_scope import CALLER, TENANT
from tandem.router.tracing.calls import Call

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
