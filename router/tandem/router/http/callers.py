"""Who a call comes from, as the layers around the endpoints left it in the ASGI scope. No client can write there."""

from __future__ import annotations

from starlette.requests import Request

TENANT = "tandem.tenant"
"""Key in the scope: the tenant that the call belongs to."""
NO_TENANT = "default"


def tenant_of(request: Request) -> str:
    """The tenant whose responses, files and batches the call may see."""
    return str(request.scope.get(TENANT, NO_TENANT))
