"""The salt of a request: its tenant's, or one that only this tenant with this cache_salt gets."""

from __future__ import annotations

from tandem.router.tenancy.cache_salt import SALT_BYTES, request_salt


def test_a_cache_salt_separates_within_a_tenant_and_never_joins_two() -> None:
    one, other = b"1" * SALT_BYTES, b"2" * SALT_BYTES
    assert request_salt(one, None) == one
    salts = [request_salt(tenant, text) for tenant in (one, other) for text in (None, "a", "b", "é")]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {SALT_BYTES}
    assert request_salt(one, "a") == request_salt(one, "a")
