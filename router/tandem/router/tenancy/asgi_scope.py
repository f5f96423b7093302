"""Keys of a call's tenant and caller in the ASGI scope; no client can write there."""

from __future__ import annotations

TENANT = "tandem.tenant"
"""The tenant that the call belongs to."""
CALLER = "tandem.caller"
"""The Caller: the tenant and rights of the request's sender."""
