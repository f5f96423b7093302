"""Authenticates requests: API keys checked against the last list that the durable store gave, and their tenants' salts.

A list that cannot be read changes nothing; a list that lost a key lets that key in no more. Requests without a key are
let in only where the configuration states so (see Anonymous).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache

from tandem.core.api_keys import ApiKey, Scope, id_of
from tandem.core.config import Anonymous
from tandem.core.errors import AuthError, PermissionDeniedError, StartupError
from tandem.core.secret import ClusterSecret
from tandem.router.admission.slo_classes import ANONYMOUS, Caller
from tandem.router.error_quoting import quoted

SALT_BYTES = 16
_KNOWN_SALTS = 4096
_HOW = "send it as Authorization: Bearer <key>, or as x-api-key: <key>"


class Authenticator:
    """All of it runs on the event loop. `wall_s` gives seconds since 1970."""

    def __init__(self, anonymous: Anonymous, wall_s: Callable[[], float]) -> None:
        self._anonymous, self._wall_s = anonymous, wall_s
        self._keys: dict[str, ApiKey] = {}
        self._had_keys = False

    @property
    def keys(self) -> list[ApiKey]:
        return list(self._keys.values())

    @property
    def anonymous(self) -> Anonymous:
        """The setting that decides when requests without a key are let in."""
        return self._anonymous

    @property
    def is_open(self) -> bool:
        """True if requests without a key are let in. Once there was a key they are not, whatever becomes of the key."""
        if self._anonymous is Anonymous.LOOPBACK:
            return not self._had_keys
        return self._anonymous is Anonymous.ALWAYS

    def check_host(self, host: str) -> None:
        """StartupError when the API would listen on `host` for all, and no setting allows that."""
        if self._anonymous is not Anonymous.LOOPBACK or self._keys or _is_loopback(host):
            return
        raise StartupError(
            f"--host is {host!r}, and there is no API key", why="anyone who can reach it could use it",
            todo="create one with `clusterctl key create` while it listens on loopback, or use --anonymous never and"
            " create one afterwards, or let everyone in with --anonymous always",
        )  # fmt: skip

    def set_keys(self, keys: Iterable[ApiKey]) -> None:
        """From now on exactly these count."""
        self._keys = {key.id: key for key in keys}
        self._had_keys = self._had_keys or bool(self._keys)

    def serves(self, tenant: str) -> bool:
        """True if the tenant could ask for anything now: it has a key, or needs none."""
        if self.is_open and tenant == ANONYMOUS.tenant:
            return True
        now_s = self._wall_s()
        return any(
            key.tenant == tenant and Scope.INFER in key.scopes and not key.is_expired(now_s)
            for key in self._keys.values()
        )

    def admit(self, authorization: str | None, scope: Scope) -> Caller:
        """The caller that sends `authorization` (the header's value); AuthError or PermissionDeniedError if not for
        `scope`.

        Where requests without a key are let in, a value that does not look like a key of ours is ignored: clients have
        to send something. The admin port lets none in so.
        """
        kind, _, text = (authorization or "").partition(" ")
        text = text.strip() if kind.lower() == "bearer" else ""
        number = id_of(text)
        if self.is_open and number is None and scope is not Scope.ADMIN:
            return ANONYMOUS
        if not text:
            raise AuthError("no API key was given", todo=_HOW)
        key = self._keys.get(number or "")
        if key is None or not key.is_opened_by(text):
            raise AuthError("the API key is not valid", why="it is unknown, or it was revoked", todo="use another one")
        if key.is_expired(self._wall_s()):
            raise AuthError(f"the API key {key.shown} has expired", todo="use another one")
        if scope not in key.scopes:
            raise PermissionDeniedError(
                f"the API key {key.shown} may not do this", why=f"it lacks the scope {scope.value}",
                todo="use one that has it",
            )  # fmt: skip
        sees_load = Scope.METRICS in key.scopes
        return Caller(tenant=key.tenant, key_id=key.id, slo=key.slo, priority=key.priority, sees_load=sees_load)

    def check_name(self, host: str | None) -> None:
        """PermissionDeniedError when a request without a key calls this machine by another name than its own, where
        that lets it in: a page's own name may be made to point here (DNS rebinding). `host`: the header, if any."""
        if self._anonymous is not Anonymous.LOOPBACK or host is None:
            return
        name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
        if not any(map(str.isalnum, name)):  # it names nothing, and no browser sends that
            return
        if not _is_loopback(name) and not name.lower().rstrip(".").endswith(".localhost"):
            raise PermissionDeniedError(
                f"the Host is {quoted(host)}", why="without an API key this router is asked as localhost alone",
                todo="use http://127.0.0.1 or http://localhost, or create a key with `clusterctl key create`",
                param="host",
            )  # fmt: skip


@lru_cache(maxsize=64)
def _is_loopback(host: str) -> bool:
    try:
        return host.lower().rstrip(".") == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TenantSalts:
    """Separate the cached blocks of tenants: derived on the server, so that no client can choose another tenant's."""

    def __init__(self, secret: ClusterSecret) -> None:
        @lru_cache(maxsize=_KNOWN_SALTS)
        def derive(tenant: str) -> bytes:
            return secret.derive(b"tenant:" + tenant.encode())[:SALT_BYTES]

        self._derive = derive

    def of(self, tenant: str) -> bytes:
        """16 bytes, the same in every router of the cluster."""
        return self._derive(tenant)


def request_salt(tenant_salt: bytes, cache_salt: str | None) -> bytes:
    """The salt of a request: its tenant's, or one for this `cache_salt` of this tenant, which no other tenant can get.

    A client's value is hashed under a key that it does not know, so no client learns or chooses another one's salt.
    """
    if cache_salt is None:
        return tenant_salt
    return hmac.new(tenant_salt, b"cache_salt:" + cache_salt.encode(), hashlib.sha256).digest()[:SALT_BYTES]


TENANT = "tandem.tenant"
"""The tenant that the call belongs to."""
CALLER = "tandem.caller"
"""The Caller: the tenant and rights of the request's sender."""
