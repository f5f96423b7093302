"""API keys on a real server: routers follow changes, outages change nothing, and what is lost opens nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import RedisError

from tandem.core.api_keys import ApiKey, KeyWish, Scope, draw
from tandem.core.errors import UnavailableError
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.stores.api_keys import ApiKeyStore, from_json, to_json

KEYS = Keys("test")
TEXT, FIRST = draw(KeyWish(tenant="a", scopes=(Scope.INFER, Scope.ADMIN), slo="fast", name="é"), 1000)
_, SECOND = draw(KeyWish(tenant="b", lifetime_s=60, priority=7), 2000)


def test_a_record_is_read_back_equal() -> None:
    assert from_json(to_json(FIRST)) == FIRST
    assert from_json(to_json(SECOND).encode()) == SECOND


def test_added_listed_revoked(server: PrivateRedis, client: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store = ApiKeyStore(redis, KEYS)
            assert await store.all() == []
            await store.add(SECOND)
            await store.add(FIRST)
            await store.add(FIRST)  # again, as after a lost answer
            assert await store.all() == [FIRST, SECOND]
            everything = b"".join((await redis.hgetall(KEYS.api_keys)).values())
            assert TEXT.encode() not in everything
            assert TEXT.rpartition("-")[2].encode() not in everything
            assert await store.revoke(FIRST.id, 3000.0)
            assert not await store.revoke(FIRST.id, 3001.0)
            assert not await store.revoke("never", 3002.0)
            assert (await store.all(), await store.revoked()) == ([SECOND], [FIRST.id])
            assert await store.revoke(SECOND.id, 3003.0)
            assert await store.revoked() == [SECOND.id, FIRST.id]

    asyncio.run(scenario())


def test_a_revoked_key_whose_record_comes_back_opens_nothing(server: PrivateRedis, client: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store = ApiKeyStore(redis, KEYS)
            await store.add(FIRST)
            assert await store.revoke(FIRST.id, 3000.0)
            await redis.hset(KEYS.api_keys, FIRST.id, to_json(FIRST))  # from a dump, or a replica that lagged
            assert await store.all() == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", "{}", to_json(FIRST).replace('"infer"', '"root"'),
     to_json(FIRST).replace('"slo":"fast"', '"slo":1'), to_json(FIRST).replace('"created_s":1000', '"created_s":"x"'),
     to_json(FIRST).replace(f'"id":"{FIRST.id}"', '"id":1'), to_json(FIRST).replace(FIRST.digest, "é")],
)  # fmt: skip
def test_what_cannot_be_read_opens_nothing(server: PrivateRedis, client: Any, text: str) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store = ApiKeyStore(redis, KEYS)
            await store.add(SECOND)
            await redis.hset(KEYS.api_keys, FIRST.id, text)
            assert await store.all() == [SECOND]

    asyncio.run(scenario())


def test_watchers_hear_of_changes_at_once_and_keep_what_they_know_in_an_outage(
    server: PrivateRedis, client: Any, until: Any, running: Any
) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store, seen = ApiKeyStore(redis, KEYS), list[list[ApiKey]]()
            async with running(store.watch(seen.append, poll_s=600)):
                await until(lambda: seen and seen[-1] == [])
                await until(lambda: _subscribers(redis))
                await store.add(FIRST)
                await until(lambda: seen[-1] == [FIRST])
                server.stop()
                with pytest.raises(UnavailableError):
                    await store.all()
                with pytest.raises(UnavailableError):
                    await store.add(SECOND)
                with pytest.raises(UnavailableError):
                    await store.revoke(FIRST.id, 3000.0)
                assert seen[-1] == [FIRST]
                with PrivateRedis.start(server.directory, "a secret", port=server.port):
                    await until(lambda: _subscribers(redis))
                    await store.add(SECOND)
                    await until(lambda: seen[-1] == [FIRST, SECOND])
                    await redis.delete(KEYS.api_keys)
                    await store.revoke(FIRST.id, 3000.0)
                    await until(lambda: seen[-1] == [])

    asyncio.run(scenario())


def test_polling_alone_is_enough(server: PrivateRedis, client: Any, until: Any, running: Any) -> None:
    async def scenario() -> None:
        async with client(server.url) as redis:
            store, seen = ApiKeyStore(redis, KEYS), list[list[ApiKey]]()
            async with running(store._poll(seen.append, 0.02)):
                await until(lambda: seen and seen[-1] == [])
                await redis.hset(KEYS.api_keys, FIRST.id, to_json(FIRST))
                await until(lambda: seen[-1] == [FIRST])

    asyncio.run(scenario())


async def _subscribers(redis: Any) -> bool:
    try:
        _, count = await redis.execute_command("PUBSUB", "NUMSUB", KEYS.api_keys_channel)
    except (RedisError, OSError):  # the server is starting
        return False
    return bool(count)
