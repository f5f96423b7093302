"""Who a call comes from, as the layers around the endpoints left it in the ASGI scope. No client can write there."""

from __future__ import annotations

from starlette.requests import Request

from tandem.router.admission.gate import ANONYMOUS, Caller

TENANT = "tandem.tenant"
"""Key in the scope: the tenant that the call belongs to."""
CALLER = "tandem.caller"
"""Key in the scope: what is known of whoever called; not there for calls of batches, which have a tenant alone."""


def tenant_of(request: Request) -> str:
    """The tenant whose responses, files and batches the call may see."""
    return str(request.scope.get(TENANT, ANONYMOUS.tenant))


def caller_of(request: Request) -> Caller:
    """Whose request it is."""
    caller: Caller | None = request.scope.get(CALLER)
    return caller or Caller(tenant=tenant_of(request))
