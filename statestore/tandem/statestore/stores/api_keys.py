"""API keys in the durable store: one hash a cluster with a record by id. Secrets never come here, only digests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tandem.core.api_keys import ApiKey, Scope
from tandem.statestore.connection import raising_unavailable
from tandem.statestore.keys import Keys
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.when_full import HASH_FIRST

_log = logging.getLogger(__name__)
POLL_S: Final = 5.0
KEPT_REVOKED: Final = 1000
"""So many of the last revoked keys are remembered, in case they are revoked again."""

CONFIRM_S: Final = 2.0
_ADD: Final = f"{HASH_FIRST}return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
# KEYS: keys, revoked. ARGV: id, second.
_REVOKE: Final = f"""
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -{KEPT_REVOKED} - 1)
return 1
"""


class ApiKeyStore:
    """Reads and writes API keys. All but `watch` raise UnavailableError when Redis does not answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis: Any = redis  # its stubs mix plain and awaitable results
        self._hash, self._revoked, self._channel = keys.api_keys, keys.revoked_api_keys, keys.api_keys_channel
        self._wakeups = Wakeups(redis, self._channel)
        self._add: Any = redis.register_script(_ADD)
        self._revoke: Any = redis.register_script(_REVOKE)

    async def add(self, key: ApiKey) -> None:
        """Keep a new key; adding it again changes nothing."""
        with raising_unavailable():
            await self._add(keys=[self._hash], args=[key.id, to_json(key)])
            await self._redis.publish(self._channel, key.id)

    async def revoke(self, key_id: str, now_s: float) -> bool:
        """Forget a key but for its id; False = there was none. If this is cut off half way, the key opens nothing and
        can be revoked again.

        Returns once the server has that on disk, and one of its replicas where it has any; in CONFIRM_S each at most.
        """
        with raising_unavailable():
            async with self._redis.client() as one:  # a server confirms what came over the same connection
                names = [self._hash, self._revoked]
                was_there = bool(await self._revoke(keys=names, args=[key_id, int(now_s)], client=one))
                await one.publish(self._channel, key_id)
                await _confirm(one, key_id)
        return was_there

    async def revoked(self) -> list[str]:
        """Ids of the last KEPT_REVOKED keys that were revoked, the latest first."""
        with raising_unavailable():
            rows = await self._redis.zrevrange(self._revoked, 0, -1)
        return [row.decode() for row in rows]

    async def all(self) -> list[ApiKey]:
        """Every key, the oldest first. Unreadable and revoked ones are left out: such a key opens nothing."""
        with raising_unavailable():
            async with self._redis.pipeline(transaction=False) as pipeline:  # a key revoked in between stays revoked
                pipeline.hgetall(self._hash)
                pipeline.zrange(self._revoked, 0, -1)
                rows, revoked = await pipeline.execute()
        found, gone = [], set(revoked)
        for field, text in rows.items():
            if field in gone:
                continue
            try:
                found.append(from_json(text))
            except (ValueError, TypeError, KeyError) as error:
                _log.error("API key not readable", extra={"fields": {"id": field, "why": type(error).__name__}})
        return sorted(found, key=lambda key: (key.created_s, key.id))

    async def watch(self, on_keys: Callable[[list[ApiKey]], None], *, poll_s: float = POLL_S) -> None:
        """Call `on_keys` with every key now, after a change, and every `poll_s`, until cancelled.

        It is called in this task and must not block. In an outage it is not called: the last known keys count.
        """

        async def look() -> None:
            on_keys(await self.all())

        await self._wakeups.poll(look, poll_s, "API keys")


async def _confirm(one: Any, key_id: str) -> None:
    """Wait until what was written is on disk, and at a replica; log if that cannot be known."""
    milliseconds = int(CONFIRM_S * 1000)
    try:
        replicas = int((await one.info("replication")).get("connected_slaves", 0))
        is_there = not replicas or bool(await one.wait(1, milliseconds))
        local, _ = await one.execute_command("WAITAOF", 1, 0, milliseconds)  # not in servers before 7.2
        why = "" if local and is_there else "not within the time given"
    except ResponseError as error:
        why = str(error)
    if why:
        _log.info("revocation not confirmed", extra={"fields": {"id": key_id, "why": why}})


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
        raise ValueError("digest is not a SHA-256")
    return key
