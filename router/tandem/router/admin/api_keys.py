"""API keys as the admin port offers them: list, create (the one time that a key is shown), revoke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tandem.core.admin_schema import KeyFacts, copied
from tandem.core.api_keys import ApiKey, KeyWish, Scope, draw, shown_id
from tandem.core.errors import InvalidRequestError
from tandem.router.tenancy.authenticator import Authenticator

_log = logging.getLogger(__name__)
RETRY_S = 2.0


class KeyStore(Protocol):
    """Store of API keys. Every call but `watch` raises UnavailableError when it cannot be reached."""

    async def add(self, key: ApiKey) -> None: ...
    async def revoke(self, key_id: str, now_s: float) -> bool: ...
    async def revoked(self) -> list[str]: ...
    async def all(self) -> list[ApiKey]: ...
    async def watch(self, on_keys: Callable[[list[ApiKey]], None]) -> None: ...


class NewKey(BaseModel):
    """The body of a request for a key; fields that are left out are as in KeyWish."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    tenant: str
    scopes: list[Literal["infer", "admin", "metrics"]] = Field(default=["infer"])
    lifetime_s: int = Field(default=0, le=10**10)
    slo: str = ""
    priority: int = 0
    name: str = ""


class Keyring:
    """API keys as an operator changes them. Changes count here at once, in other routers when they receive them."""

    def __init__(
        self, store: KeyStore, gate: Authenticator, classes: Callable[[], Collection[str]], wall_s: Callable[[], float]
    ) -> None:
        self._store, self._gate, self._classes, self._wall_s = store, gate, classes, wall_s

    async def load(self) -> None:
        """Ask the store for every key."""
        self._gate.set_keys(await self._store.all())

    async def follow(self) -> None:
        """Keep the gate's keys as the store's, until cancelled. While that fails, the keys known last count."""
        while True:
            try:
                await self._store.watch(self._gate.set_keys)
            except Exception:  # noqa: BLE001 - supervises the watcher; the router goes on without it
                _log.exception("API keys cannot be followed")
            await asyncio.sleep(RETRY_S)

    async def list(self) -> dict[str, Any]:
        """List every key without its secret, the last revoked ones, and access without a key."""
        await self.load()
        return {
            "keys": [self._shown(key) for key in self._gate.keys],
            "revoked": [shown_id(key_id) for key_id in await self._store.revoked()],
            "anonymous": self._gate.anonymous.value,
            "is_open": self._gate.is_open,
        }

    async def create(self, new: NewKey) -> dict[str, Any]:
        """Draw a key and keep its digest; `key` in the answer is shown this once."""
        if new.slo and new.slo not in self._classes():
            known = ", ".join(sorted(self._classes())) or "none"
            raise InvalidRequestError(f"the SLO class {new.slo[:80]!r} does not exist", why=f"there are: {known}",
                                      todo="add it to the configuration", param="slo")  # fmt: skip
        wish = KeyWish(
            tenant=new.tenant, scopes=[Scope(scope) for scope in new.scopes], lifetime_s=new.lifetime_s, slo=new.slo,
            priority=new.priority, name=new.name,
        )  # fmt: skip
        text, key = draw(wish, self._wall_s())
        await self._store.add(key)
        await self.load()
        return {"key": text, **self._shown(key)}

    async def revoke(self, key_id: str) -> dict[str, Any]:
        """Forget a key by its id, with or without `tdk-` before it. `is_revoked` is false if there never was one,
        `is_changed` is true if this call did it."""
        shown = shown_id(key_id)
        plain = shown.removeprefix("tdk-")
        was_there = await self._store.revoke(plain, self._wall_s())
        await self.load()
        is_revoked = was_there or plain in await self._store.revoked()
        return {"id": shown, "is_revoked": is_revoked, "is_changed": was_there}

    def _shown(self, key: ApiKey) -> dict[str, Any]:
        return copied(
            KeyFacts,
            key,
            id=key.shown,
            scopes=[scope.value for scope in key.scopes],
            expires_s=key.expires_s or None,
            is_expired=key.is_expired(self._wall_s()),
        )
