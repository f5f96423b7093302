"""API keys in the durable store: one hash a cluster with a record by id. Secrets never come here, only digests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from redis.asyncio import Redis

from tandem.core.apikeys import ApiKey, Scope
from tandem.core.errors import UnavailableError
from tandem.prefixindex.connection import OUTAGE, Backoff, no_answer
from tandem.prefixindex.keys import Keys
from tandem.prefixindex.wakeup import Wakeups

_log = logging.getLogger(__name__)
POLL_S: Final = 5.0
KEPT_REVOKED: Final = 1000
"""So many of the last that were revoked are remembered, for whoever revokes them again."""


class ApiKeyStore:
    """Reads and writes them. All but `watch` raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._hash, self._revoked, self._channel = keys.api_keys, keys.revoked_api_keys, keys.api_keys_channel
        self._wakeups = Wakeups(redis, self._channel)

    async def add(self, key: ApiKey) -> None:
        """Keep a new key; adding it again changes nothing."""
        try:
            await self._redis.hset(self._hash, key.id, to_json(key))
            await self._redis.publish(self._channel, key.id)
        except OUTAGE as error:
            raise no_answer(error) from error

    async def revoke(self, key_id: str, now_s: float) -> bool:
        """Forget a key but for its id; False = there was none. Cut off half way, it is still there to be revoked."""
        try:
            if await self._redis.hexists(self._hash, key_id):
                await self._redis.zadd(self._revoked, {key_id: int(now_s)})
                await self._redis.zremrangebyrank(self._revoked, 0, -KEPT_REVOKED - 1)
            was_there = bool(await self._redis.hdel(self._hash, key_id))
            await self._redis.publish(self._channel, key_id)
        except OUTAGE as error:
            raise no_answer(error) from error
        return was_there

    async def revoked(self) -> list[str]:
        """Ids of the last KEPT_REVOKED keys that were revoked, the latest first."""
        try:
            rows = await self._redis.zrevrange(self._revoked, 0, -1)
        except OUTAGE as error:
            raise no_answer(error) from error
        return [row.decode() for row in rows]

    async def all(self) -> list[ApiKey]:
        """Every key, the oldest first. What cannot be read is left out: such a key opens nothing."""
        try:
            rows = await self._redis.hgetall(self._hash)
        except OUTAGE as error:
            raise no_answer(error) from error
        found = []
        for field, text in rows.items():
            try:
                found.append(from_json(text))
            except (ValueError, TypeError, KeyError) as error:
                _log.error("API key not readable", extra={"fields": {"id": field, "why": type(error).__name__}})
        return sorted(found, key=lambda key: (key.created_s, key.id))

    async def watch(self, on_keys: Callable[[list[ApiKey]], None], *, poll_s: float = POLL_S) -> None:
        """Call `on_keys` with every key now, after a change, and every `poll_s`, until cancelled.

        It is called in this task and must not block. In an outage it is not called: what was known last counts.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._wakeups.run())
            await self._poll(on_keys, poll_s)

    async def _poll(self, on_keys: Callable[[list[ApiKey]], None], poll_s: float) -> None:
        backoff = Backoff()
        while True:
            try:
                on_keys(await self.all())
            except UnavailableError as error:
                _log.warning("API keys not readable", extra={"fields": {"why": error.why}})
                await backoff.pause()
                continue
            backoff.reset()
            await self._wakeups.wait(poll_s)


def to_json(key: ApiKey) -> str:
    """One line of JSON."""
    return json.dumps(asdict(key), separators=(",", ":"))


def from_json(text: bytes | str) -> ApiKey:
    """The key; ValueError, TypeError or KeyError when it is none."""
    raw = json.loads(text)
    key = ApiKey(**{**raw, "scopes": tuple(Scope(scope) for scope in raw["scopes"])})
    kinds = {
        str: ("id", "digest", "tenant", "slo", "name"),
        int: ("created_s", "expires_s", "priority"),
    }
    for name, kind in ((name, kind) for kind, names in kinds.items() for name in names):
        if type(getattr(key, name)) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    if len(key.digest) != 64 or not key.digest.isascii():
        raise ValueError("digest is no SHA-256")
    return key
