"""Test authentication of clients, and the salt of a request's cache."""

import pytest

from tandem.core.api_keys import ApiKey, KeyWish, Scope, draw
from tandem.core.config import Anonymous
from tandem.core.errors import AuthError, PermissionDeniedError, StartupError
from tandem.core.secret import ClusterSecret
from tandem.router.admission.slo_classes import ANONYMOUS
from tandem.router.tenancy.authenticator import SALT_BYTES, Authenticator, TenantSalts, request_salt


class Watch:
    """Seconds since 1970 that move on request."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def opened(anonymous: Anonymous = Anonymous.LOOPBACK, **wish: object) -> tuple[Authenticator, str, ApiKey, Watch]:
    """A gate with one key."""
    watch = Watch()
    gate = Authenticator(anonymous, watch)
    text, key = draw(KeyWish(**{"tenant": "acme", "slo": "fast", "priority": -5, **wish}), watch())  # type: ignore[arg-type]
    gate.set_keys([key])
    return gate, text, key, watch


def test_a_key_says_whose_request_it_is() -> None:
    gate, text, key, _ = opened()
    for header in (f"Bearer {text}", f"bearer  {text} "):
        caller = gate.admit(header, Scope.INFER)
        assert (caller.tenant, caller.key_id, caller.slo, caller.priority) == ("acme", key.id, "fast", -5)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer none", "Basic abc", "Bearer tdk-0123456789ab-" + "x" * 43]
)
def test_nothing_else_opens_once_there_are_keys(header: str | None) -> None:
    gate, _, _, _ = opened()
    with pytest.raises(AuthError):
        gate.admit(header, Scope.INFER)


def test_the_scheme_and_every_character_count() -> None:
    gate, text, _, _ = opened()
    for header in (text, f"Basic {text}", f"Bearer {text}x", f"Bearer {text[:-1]}", f"Bearer {text[:-1]}!"):
        with pytest.raises(AuthError):
            gate.admit(header, Scope.INFER)


def test_a_scope_that_is_missing_is_forbidden_by_name() -> None:
    gate, text, key, _ = opened(scopes=(Scope.METRICS,))
    assert gate.admit(f"Bearer {text}", Scope.METRICS).tenant == "acme"
    for scope in (Scope.INFER, Scope.ADMIN):
        with pytest.raises(PermissionDeniedError, match=f"{key.shown} may not.*{scope.value}") as caught:
            gate.admit(f"Bearer {text}", scope)
        assert text not in caught.value.message


def test_an_expired_key_is_refused_without_any_news() -> None:
    gate, text, _, watch = opened(lifetime_s=60)
    assert gate.admit(f"Bearer {text}", Scope.INFER)
    watch.now_s += 60
    with pytest.raises(AuthError, match="expired"):
        gate.admit(f"Bearer {text}", Scope.INFER)


def test_without_any_key_everybody_is_let_in_but_not_as_an_admin() -> None:
    gate = Authenticator(Anonymous.LOOPBACK, Watch())
    for header in (None, "Bearer none", "Bearer sk-whatever"):
        assert gate.admit(header, Scope.INFER) == ANONYMOUS
        assert gate.admit(header, Scope.METRICS) == ANONYMOUS
        with pytest.raises(AuthError):
            gate.admit(header, Scope.ADMIN)


def test_lost_keys_fail_closed() -> None:
    gate, text, _, _ = opened()
    gate.set_keys([])
    assert not gate.is_open
    for header in (f"Bearer {text}", None, "Bearer none"):
        with pytest.raises(AuthError):
            gate.admit(header, Scope.INFER)


def test_a_lost_key_is_no_anonymous_request_even_where_these_are_allowed() -> None:
    gate, text, _, _ = opened(Anonymous.ALWAYS)
    assert gate.admit(None, Scope.INFER) == ANONYMOUS
    assert gate.admit(f"Bearer {text}", Scope.INFER).tenant == "acme"
    gate.set_keys([])
    assert gate.admit("Bearer none", Scope.INFER) == ANONYMOUS
    with pytest.raises(AuthError):
        gate.admit(f"Bearer {text}", Scope.INFER)


def test_never_means_never() -> None:
    gate = Authenticator(Anonymous.NEVER, Watch())
    with pytest.raises(AuthError, match="no API key was given"):
        gate.admit(None, Scope.INFER)


@pytest.mark.parametrize(
    ("host", "anonymous", "has_key", "is_fine"),
    [
        ("127.0.0.1", Anonymous.LOOPBACK, False, True),
        ("::1", Anonymous.LOOPBACK, False, True),
        ("localhost", Anonymous.LOOPBACK, False, True),
        ("0.0.0.0", Anonymous.LOOPBACK, False, False),
        ("example.org", Anonymous.LOOPBACK, False, False),
        ("0.0.0.0", Anonymous.LOOPBACK, True, True),
        ("0.0.0.0", Anonymous.ALWAYS, False, True),
        ("0.0.0.0", Anonymous.NEVER, False, True),
    ],
)
def test_nobody_listens_to_the_world_by_accident(host: str, anonymous: Anonymous, has_key: bool, is_fine: bool) -> None:
    gate = opened(anonymous)[0] if has_key else Authenticator(anonymous, Watch())
    if is_fine:
        gate.check_host(host)
    else:
        with pytest.raises(StartupError, match=r"there is no API key.*clusterctl key create"):
            gate.check_host(host)


def test_salts_are_the_tenants_own_and_the_clusters() -> None:
    secret = ClusterSecret(b"s" * 32)
    salts, again = TenantSalts(secret), TenantSalts(ClusterSecret(b"s" * 32))
    elsewhere = TenantSalts(ClusterSecret(b"t" * 32))
    assert salts.of("a") == again.of("a")
    assert len({salts.of("a"), salts.of("b"), elsewhere.of("a")}) == 3
    assert len(salts.of("a")) == 16


def test_a_cache_salt_separates_within_a_tenant_and_never_joins_two() -> None:
    one, other = b"1" * SALT_BYTES, b"2" * SALT_BYTES
    assert request_salt(one, None) == one
    salts = [request_salt(tenant, text) for tenant in (one, other) for text in (None, "a", "b", "é")]
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts} == {SALT_BYTES}
    assert request_salt(one, "a") == request_salt(one, "a")
