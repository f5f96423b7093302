"""Under which names the ASGI scope of a call says whose it is; no client can write there."""

from __future__ import annotations

TENANT = "tandem.tenant"
"""The tenant that the call belongs to."""
CALLER = "tandem.caller"
"""The Caller: what is known of whoever called."""
