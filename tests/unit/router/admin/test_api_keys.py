"""How a router follows the keys of its cluster."""

import asyncio
from collections.abc import Callable

import pytest

from tandem.core.api_keys import ApiKey, KeyWish, draw
from tandem.core.config import Anonymous
from tandem.router.admin import api_keys
from tandem.router.admin.api_keys import Keyring
from tandem.router.tenancy.authenticator import Authenticator

_, KEY = draw(KeyWish(tenant="a"), 1000)


class Store:
    """A store with a watcher that fails the first time."""

    def __init__(self) -> None:
        self.watchers = 0
        self.is_told = asyncio.Event()

    async def add(self, key: ApiKey) -> None: ...

    async def revoke(self, key_id: str, now_s: float) -> bool:
        return False

    async def revoked(self) -> list[str]:
        return []

    async def all(self) -> list[ApiKey]:
        return []

    async def watch(self, on_keys: Callable[[list[ApiKey]], None]) -> None:
        self.watchers += 1
        if self.watchers == 1:
            raise TypeError("'<' not supported between instances of 'str' and 'int'")
        on_keys([KEY])
        self.is_told.set()
        await asyncio.Event().wait()


async def test_a_watcher_that_fails_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "RETRY_S", 0.0)
    store, gate = Store(), Authenticator(Anonymous.LOOPBACK, lambda: 1000.0)
    following = asyncio.create_task(Keyring(store, gate, tuple, lambda: 1000.0).follow())
    async with asyncio.timeout(20.0):
        await store.is_told.wait()
    assert gate.keys == [KEY]
    following.cancel()
    await asyncio.wait([following])
