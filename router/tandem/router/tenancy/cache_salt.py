"""Isolation of cached blocks: the salt in the root of a request's block hashes, derived on the server."""

from __future__ import annotations

import hashlib
import hmac

SALT_BYTES = 16


def request_salt(tenant_salt: bytes, cache_salt: str | None) -> bytes:
    """The salt of a request: its tenant's, or one for this `cache_salt` of this tenant, which no other tenant can get.

    A client's value is hashed under a key that it does not know, so no client learns or chooses another one's salt.
    """
    if cache_salt is None:
        return tenant_salt
    return hmac.new(tenant_salt, b"cache_salt:" + cache_salt.encode(), hashlib.sha256).digest()[:SALT_BYTES]
