"""API keys: how one is drawn, what it allows, and how it is recognised. What is kept is a digest, never the key.

    tdk-<id: 12 hexadecimal digits>-<secret: 43 characters that hold 32 random bytes>

`tdk-<id>` may be shown and logged. A plain SHA-256 is enough: 2^256 secrets cannot be tried.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import InvalidRequestError

MAX_NAME_CHARS = 200
MOST_URGENT, LEAST_URGENT = -100, 100
"""Priorities; lower numbers are served first."""
ANONYMOUS_TENANT = "anonymous"
"""Tenant of requests without a key, where those are accepted."""
_KEY = re.compile(r"tdk-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Scope(StrEnum):
    """INFER: everything under /v1 and gRPC. METRICS: /metrics of the API's port. ADMIN: the admin port."""

    INFER = "infer"
    ADMIN = "admin"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key without its secret. Times are seconds since 1970; `expires_s` 0 = never.

    `slo` names the class that its requests belong to, "" = the client may choose. `priority` is the most urgent one
    that its requests may ask for, and theirs if they ask for none.
    """

    id: str
    digest: str
    tenant: str
    scopes: tuple[Scope, ...]
    created_s: int
    expires_s: int = 0
    slo: str = ""
    priority: int = 0
    name: str = ""

    @property
    def shown(self) -> str:
        """The form that users recognise it by."""
        return f"tdk-{self.id}"

    def is_expired(self, now_s: float) -> bool:
        return bool(self.expires_s) and now_s >= self.expires_s

    def is_opened_by(self, text: str) -> bool:
        """True if `text` is this key; takes the same time for every wrong one."""
        return hmac.compare_digest(_digest(text), self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWish:
    """Parameters of a new key. `lifetime_s` 0 = for ever."""

    tenant: str
    scopes: Sequence[Scope] = (Scope.INFER,)
    lifetime_s: int = 0
    slo: str = ""
    priority: int = 0
    name: str = ""

    def validate(self) -> None:
        """Raises InvalidRequestError that names the field."""
        if not _TENANT.fullmatch(self.tenant):
            raise InvalidRequestError(
                f"the tenant is {self.tenant[:80]!r}", why="it must have 1 to 64 letters, digits, dots, dashes or _",
                param="tenant",
            )  # fmt: skip
        if self.tenant == ANONYMOUS_TENANT:
            raise InvalidRequestError(
                f"the tenant is {self.tenant!r}", why="that is what requests without a key are called", param="tenant"
            )
        if not self.scopes or len(set(self.scopes)) < len(self.scopes):
            raise InvalidRequestError("a key needs scopes, each once", todo="give at least one", param="scopes")
        if self.lifetime_s < 0:
            raise InvalidRequestError("the key would have expired already", param="lifetime_s")
        if not MOST_URGENT <= self.priority <= LEAST_URGENT:
            why = f"it must be between {MOST_URGENT} and {LEAST_URGENT}"
            raise InvalidRequestError(f"priority is {self.priority}", why=why, param="priority")
        if len(self.name) > MAX_NAME_CHARS or not self.name.isprintable():
            why = f"it must have at most {MAX_NAME_CHARS} printable characters"
            raise InvalidRequestError("the name of the key is wrong", why=why, param="name")


def draw(wish: KeyWish, now_s: float) -> tuple[str, ApiKey]:
    """Create a new key, to be shown once, and the record that is kept of it; raises InvalidRequestError."""
    wish.validate()
    number = secrets.token_hex(6)
    text = f"tdk-{number}-{secrets.token_urlsafe(32)}"
    key = ApiKey(
        id=number,
        digest=_digest(text),
        tenant=wish.tenant,
        scopes=tuple(wish.scopes),
        created_s=int(now_s),
        expires_s=int(now_s) + wish.lifetime_s if wish.lifetime_s else 0,
        slo=wish.slo,
        priority=wish.priority,
        name=wish.name,
    )
    return text, key


def id_of(text: str) -> str | None:
    """The id in something that looks like a key; None if it does not."""
    match = _KEY.fullmatch(text)
    return match[1] if match else None


def shown_id(text: str) -> str:
    """`tdk-<id>` of an id as typed: with or without `tdk-` before it or a secret after it."""
    return f"tdk-{text.removeprefix('tdk-').partition('-')[0]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
