"""The desired state on a real server: one of two writers wins, watchers see it, and it survives a restart."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.desired import DesiredState, Pool
from tandem.core.desired_changes import cordoned
from tandem.core.errors import ConfigError, UnavailableError
from tandem.core.state_enums import RoleName
from tandem.statestore.embedded_redis import PrivateRedis
from tandem.statestore.keys import Keys
from tandem.statestore.pubsub import Wakeups
from tandem.statestore.stores.desired import DesiredStateStore, Recorded, from_json

KEYS = Keys("test")
FIRST = DesiredState(version=1, pools=(Pool(name="m", model="x", role=RoleName.MIXED, count=1),)).filled()
SECOND = replace(FIRST, version=2, pools=(replace(FIRST.pools[0], count=3),), members=()).filled()


async def test_one_of_two_writers_wins(redis: Any) -> None:
    one, two = DesiredStateStore(redis, KEYS), DesiredStateStore(redis, KEYS)
    assert await one.load() is None
    assert await one.save(FIRST, 0)
    assert await one.save(FIRST, 0)  # the same call again, as after a lost answer
    assert not await two.save(replace(SECOND, version=1), 0)
    assert await two.save(SECOND, 1)
    assert not await one.save(FIRST, 0)
    assert await one.load() == SECOND


async def test_what_cannot_serve_or_skips_a_version_is_refused(redis: Any) -> None:
    store = DesiredStateStore(redis, KEYS)
    with pytest.raises(ValueError, match="cannot follow"):
        await store.save(SECOND, 0)
    with pytest.raises(ConfigError):
        await store.save(DesiredState(version=1, pools=()), 0)
    with pytest.raises(ConfigError, match="counts 3 workers and names 1"):
        await store.save(replace(FIRST, pools=SECOND.pools), 0)
    assert await store.save(DesiredState(version=1, pools=(), is_stopped=True), 0)


async def test_what_another_release_wrote_can_be_replaced(redis: Any) -> None:
    store = DesiredStateStore(redis, KEYS)
    assert await store.version() == 0
    await redis.hset(KEYS.desired, mapping={"version": 7, "state": '{"version": 7, "moons": []}'})
    with pytest.raises(ConfigError, match="cannot be read"):
        await store.load()
    assert await store.version() == 7
    assert await store.save(replace(FIRST, version=8), 7)
    assert await store.load() == replace(FIRST, version=8)


EARLIER = {
    "version": 7, "max_ranks": 0, "drain_deadline_s": 9.5, "is_stopped": False, "revisions": [], "rollouts": [],
    "pools": [{"name": "m", "model": "x", "role": "mixed", "count": 2, "revision": "initial", "tp": 1,
               "hardware": "any"}],
    "members": [{"worker_id": f"m-{n}", "pool": "m", "role": "mixed", "is_cordoned": n == 1, "restart_generation": n,
                 "revision": ""} for n in range(2)],
}  # fmt: skip
"""As the release before wrote it, with members that had no deadlines of their own."""


async def test_a_record_of_the_release_before_is_read_and_drains_keep_its_deadline(redis: Any) -> None:
    store = DesiredStateStore(redis, KEYS)
    await redis.hset(KEYS.desired, mapping={"version": 7, "state": json.dumps(EARLIER)})
    state = await store.load()
    assert state is not None
    assert [(m.is_cordoned, m.restart_generation, m.drain_deadline_s) for m in state.members] == [
        (False, 0, None), (True, 1, None)
    ]  # fmt: skip
    assert [state.drain_deadline_of(name) for name in ("m-0", "m-1")] == [9.5, 9.5]
    after = cordoned(cordoned(state, "m-1", is_cordoned=False), "m-0", is_cordoned=True, deadline_s=2.0)
    assert await store.save(replace(after, version=8), 7)
    found = await store.load()
    assert found == replace(after, version=8)
    assert [found.drain_deadline_of(name) for name in ("m-0", "m-1")] == [2.0, 9.5]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "true", '"5"', "[]"])
@pytest.mark.parametrize("whose", ["the record's", "a member's"])
def test_a_deadline_that_is_none_makes_the_record_one_that_cannot_be_read(value: str, whose: str) -> None:
    raw = json.loads(json.dumps(EARLIER))
    (raw if whose == "the record's" else raw["members"][0])["drain_deadline_s"] = json.loads(value)
    with pytest.raises(ConfigError, match="not a number of seconds"):
        from_json(json.dumps(raw))


async def test_watchers_see_changes_through_restarts(
    redis: Any, server: PrivateRedis, until: Any, running: Any
) -> None:
    store, seen = DesiredStateStore(redis, KEYS), list[DesiredState]()
    await store.save(FIRST, 0)
    async with running(store.watch(seen.append, poll_s=600)):
        await until(lambda: seen == [FIRST])
        await until(lambda: redis.execute_command("PUBSUB", "NUMSUB", KEYS.desired_channel))
        await store.save(SECOND, 1)
        await until(lambda: seen == [FIRST, SECOND])
        server.stop()
        with pytest.raises(UnavailableError):
            await store.load()
        with pytest.raises(UnavailableError):
            await store.save(replace(SECOND, version=3), 2)
        with PrivateRedis.start(server.directory, "a secret", port=server.port):
            assert await store.load() == SECOND
            assert await store.save(replace(SECOND, version=3), 2)
            await until(lambda: len(seen) == 3)


async def test_polling_alone_is_enough_and_broken_text_is_survived(
    redis: Any, until: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wakeups, "run", lambda _: asyncio.sleep(60))  # it hears of no change
    store, seen = DesiredStateStore(redis, KEYS), list[DesiredState]()
    await store.save(FIRST, 0)
    async with running(store.watch(seen.append, poll_s=0.02)):
        await until(lambda: seen == [FIRST])
        await redis.hset(KEYS.desired, "state", "{")
        with pytest.raises(ConfigError):
            await store.load()
        await store.save(SECOND, 1)
        await until(lambda: seen == [FIRST, SECOND])


async def test_it_is_known_how_long_ago_it_was_written(redis: Any) -> None:
    """By the server's clock; a repetition of the same call is no new writing, and a release before did not note it."""
    store = DesiredStateStore(redis, KEYS)
    assert await store.dated() == (None, 0.0)
    await store.save(FIRST, 0)
    seconds, _ = await redis.time()
    await redis.hset(KEYS.desired, "saved_s", seconds - 100)
    assert await store.save(FIRST, 0)
    state, age_s = await store.dated()
    assert state == FIRST
    assert 100 <= age_s < 160
    assert await store.save(SECOND, 1)
    state, age_s = await store.dated()
    assert state == SECOND
    assert age_s < 60
    await redis.hdel(KEYS.desired, "saved_s")
    assert await store.dated() == (SECOND, 0.0)


async def test_what_was_configured_stands_beside_the_record_while_others_change_it(redis: Any) -> None:
    store = DesiredStateStore(redis, KEYS)
    assert await store.recorded() == Recorded(version=0, state=None, trouble="", configured=None)
    assert not await store.note_configured(FIRST, 0), "there is no record that it could stand beside"
    assert await store.save(FIRST, 0, configured=FIRST)
    assert await store.save(FIRST, 0, configured=FIRST), "the same call again, as after a lost answer"
    assert not await store.save(replace(FIRST, version=4), 3, configured=SECOND)
    assert await store.save(SECOND, 1)
    assert await store.recorded() == Recorded(version=2, state=SECOND, trouble="", configured=FIRST)
    assert not await store.note_configured(SECOND, 1)
    assert await store.note_configured(SECOND, 2)
    assert (await store.recorded()).configured == SECOND
    assert await store.load() == SECOND


async def test_a_record_of_a_release_that_noted_no_configuration_is_read_and_so_is_a_note_of_another(
    redis: Any,
) -> None:
    store = DesiredStateStore(redis, KEYS)
    await store.save(FIRST, 0)
    assert await store.recorded() == Recorded(version=1, state=FIRST, trouble="", configured=None)
    await redis.hset(KEYS.desired, "configured", "{")
    assert await store.recorded() == Recorded(version=1, state=FIRST, trouble="", configured=None)
    await redis.hset(KEYS.desired, "state", "{")
    found = await store.recorded()
    assert (found.version, found.state) == (1, None)
    assert "cannot be read" in found.trouble
