"""The desired state through a real admin port and a real Redis: proposals, writes, what is refused, and events."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tandem.core.desired import DesiredState, Pool
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.state_enums import RoleName
from tandem.statestore.connection import connect
from tandem.statestore.keys import Keys
from tandem.statestore.stores.desired import DesiredStateStore
from tandem.statestore.stores.events import ClusterEventStore
from tests.integration.router.house import ADMIN_KEY, Build, RouterHarness

START = DesiredState(version=1, max_ranks=6, pools=(
    Pool(name="prefill", model="tiny", role=RoleName.PREFILL, count=1),
    Pool(name="decode", model="tiny", role=RoleName.DECODE, count=2),
)).filled()  # fmt: skip


@pytest.fixture
def house(build: Build, redis_url: str) -> RouterHarness:
    house = build(redis_url=redis_url, decode=2)
    house.wait_ready()  # a flip takes a worker that the router does not know, or that tries a hand-off, before others
    save(house, START)
    return house


def save(house: RouterHarness, state: DesiredState) -> None:
    async def run() -> None:
        redis = await connect(house.config.redis_url)
        assert await DesiredStateStore(redis, Keys(house.config.cluster)).save(state, state.version - 1)
        await redis.aclose()

    asyncio.run(run())


def ask(house: RouterHarness, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{house.admin_url}/admin/v1{path}"
    answer = httpx.get(url, headers=headers) if body is None else httpx.post(url, headers=headers, json=body)
    return answer.status_code, answer.json()


def propose(house: RouterHarness, wish: dict[str, Any], **current: int) -> tuple[int, dict[str, Any]]:
    return ask(house, "/desired/propose", {"wish": wish, "current": current})


def test_a_proposal_changes_nothing_and_is_written_as_it_was_shown(house: RouterHarness) -> None:
    status, found = propose(house, {"verb": "scale", "counts": {"decode": 1, "prefill": 2}}, prefill=1, decode=2)
    assert (status, found["is_changed"]) == (200, True)
    assert ask(house, "/desired")[1]["desired"] == found["before"]
    assert [(row["deed"], row["worker_id"]) for row in found["changes"]] == [("flip", "decode-1")]
    assert ask(house, "/desired", {"state": found["after"]}) == (200, {"desired": found["after"]})
    assert ask(house, "/desired")[1]["desired"] == found["after"]
    assert ask(house, "/desired", {"state": found["after"]})[0] == 200, "a repetition, as after a lost answer"
    again = propose(house, {"verb": "scale", "counts": {"decode": 1, "prefill": 2}})[1]
    assert (again["is_changed"], again["changes"], again["after"]) == (False, [], found["after"])


def test_the_second_of_two_writers_is_told(house: RouterHarness) -> None:
    one = propose(house, {"verb": "scale", "counts": {"decode": 3}})[1]
    two = propose(house, {"verb": "restart", "worker": "decode-0"})[1]
    assert ask(house, "/desired", {"state": one["after"]})[0] == 200
    status, refused = ask(house, "/desired", {"state": two["after"]})
    assert (status, refused["error"]["code"]) == (409, "conflict")
    assert "it was made for version 1, and there is version 2" in refused["error"]["message"]


def test_a_rollout_that_ends_meanwhile_is_a_conflict_too(house: RouterHarness) -> None:
    """Its last step changes the revision of the pools, which no other writer may."""
    after = propose(house, {"verb": "restart", "worker": "decode-0"})[1]["after"]
    done = tuple(replace(pool, revision="r2") for pool in START.pools)
    save(house, replace(START, version=2, pools=done))
    status, refused = ask(house, "/desired", {"state": after})
    assert (status, refused["error"]["code"]) == (409, "conflict")
    assert "it was made for version 1, and there is version 2" in refused["error"]["message"]
    assert ask(house, "/desired", {"state": after | {"version": 3}})[0] == 400, "the frame holds as ever"


@pytest.mark.parametrize(
    ("wish", "current", "status", "message"),
    [
        ({"verb": "scale", "counts": {"decode": 0}}, {}, 409, "cannot serve"),
        ({"verb": "scale", "counts": {"decode": 9}}, {}, 409, "max_ranks is 6"),
        ({"verb": "scale", "counts": {"decode": 100_000}}, {}, 409, "the limit is 1024"),
        ({"verb": "scale", "ratio": [3, 1], "total": 100_000}, {}, 409, "the limit is 1024"),
        ({"verb": "scale", "counts": {"mixed": 1}}, {}, 409, "no pool of mixed workers"),
        ({"verb": "scale", "counts": {"decode": 3}}, {"decode": 1}, 409, "2 decode workers wanted now and not 1"),
        ({"verb": "scale"}, {}, 400, "either counts or a ratio"),
        ({"verb": "scale", "ratio": [1]}, {}, 400, "a ratio must have two numbers"),
        ({"verb": "scale", "counts": {"decode": -1}}, {}, 400, "counts"),
        ({"verb": "scale", "counts": {"decode": 1}, "model": "tinyy"}, {}, 404, "Did you mean tiny"),
        ({"verb": "flip", "worker": "decode-9", "role": "prefill"}, {}, 404, "no worker 'decode-9'"),
        ({"verb": "drain", "worker": "prefill-0"}, {}, 409, "1 of them drained"),
        ({"verb": "drain", "worker": "decode-0", "deadline_s": -1}, {}, 400, "deadline_s"),
        ({"verb": "restart", "worker": "prefill-0"}, {}, 409, "no other worker could do"),
        ({"verb": "explode"}, {}, 400, "wish"),
    ],
)
def test_what_cannot_be_wished(
    house: RouterHarness, wish: dict[str, Any], current: dict[str, int], status: int, message: str
) -> None:
    found, answer = propose(house, wish, **current)
    assert (found, message in answer["error"]["message"]) == (status, True), answer


def test_a_drain_a_ratio_and_their_end(house: RouterHarness) -> None:
    drained = propose(house, {"verb": "drain", "worker": "decode-1", "deadline_s": 4.0})[1]["after"]
    assert ask(house, "/desired", {"state": drained})[0] == 200
    deadlines = {member["worker_id"]: member["drain_deadline_s"] for member in drained["members"]}
    assert (deadlines.pop("decode-1"), set(deadlines.values()), drained["drain_deadline_s"]) == (4.0, {None}, 60.0)
    back = propose(house, {"verb": "uncordon", "worker": "decode-1"})[1]
    assert [(row["deed"], row["worker_id"]) for row in back["changes"]] == [("uncordon", "decode-1")]
    split = propose(house, {"verb": "scale", "ratio": [3, 1], "total": 4})[1]["after"]
    assert [pool["count"] for pool in split["pools"]] == [3, 1]


def test_only_counts_and_members_can_be_written(house: RouterHarness) -> None:
    after = propose(house, {"verb": "scale", "counts": {"decode": 3}})[1]["after"]
    other_model = [{**pool, "model": "other"} for pool in after["pools"]]
    for change in ({"max_ranks": 0}, {"is_stopped": True}, {"pools": other_model}):
        status, answer = ask(house, "/desired", {"state": after | change})
        assert (status, "only the configuration sets" in answer["error"]["message"]) == (400, True), change
    status, answer = ask(house, "/desired", {"state": {"version": 2}})
    assert (status, "state is not a desired state" in answer["error"]["message"]) == (400, True)
    escaping = [*after["members"][:-1], {**after["members"][-1], "worker_id": "../../decode-2"}]
    status, answer = ask(house, "/desired", {"state": after | {"members": escaping}})
    assert (status, "cannot name a pool or a worker" in answer["error"]["message"]) == (409, True)
    status, answer = ask(house, "/desired", {"state": after | {"members": [{**after["members"][0], "is_cordoned": 1}]}})
    assert (status, "'is_cordoned' cannot be '1'" in answer["error"]["message"]) == (400, True)
    status, answer = ask(house, "/desired", {"state": after | {"members": after["members"][:-1]}})
    assert (status, "counts 3 workers and names 2" in answer["error"]["message"]) == (409, True)


def test_a_cluster_that_stops_takes_no_wishes(house: RouterHarness) -> None:
    save(house, DesiredState(version=2, pools=START.pools, is_stopped=True))
    status, answer = propose(house, {"verb": "scale", "counts": {"decode": 3}})
    assert (status, "is being stopped" in answer["error"]["message"]) == (409, True)


def test_without_a_store_nobody_reconciles(build: Build) -> None:
    lonely = build()
    for path in ("/desired", "/events"):
        status, answer = ask(lonely, path)
        assert (status, "this cluster has no desired state" in answer["error"]["message"]) == (503, True)


def test_events_are_read_from_any_place_on(house: RouterHarness) -> None:
    every = [ClusterEvent(time_s=n, kind=EventKind.READY, subject=f"w-{n}", reason="r") for n in range(5)]

    async def append() -> None:
        redis = await connect(house.config.redis_url)
        await ClusterEventStore(redis, Keys(house.config.cluster)).append(every)
        await redis.aclose()

    assert ask(house, "/events")[1] == {"events": [], "next": "0"}
    asyncio.run(append())
    first = ask(house, "/events?count=2")[1]
    assert [row["subject"] for row in first["events"]] == ["w-3", "w-4"]
    assert ask(house, f"/events?after={first['next']}")[1] == {"events": [], "next": first["next"]}
    assert [row["subject"] for row in ask(house, "/events?after=0&count=3")[1]["events"]] == ["w-0", "w-1", "w-2"]
    for wrong in ("count=0", "count=x", "count=501", "after=nowhere"):
        assert ask(house, f"/events?{wrong}")[0] == 400
    assert httpx.get(f"{house.admin_url}/admin/v1/events").status_code == 401
