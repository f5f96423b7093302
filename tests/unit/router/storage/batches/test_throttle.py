"""Test the throttle of batches, its concurrency and the owners' turns."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.state_enums import RoleName
from tandem.router.storage.batches.concurrency import (
    GRACE_S,
    GROW_S,
    YIELD_S,
    BatchSlot,
    Pace,
    RevokedError,
    Slots,
    waiting,
)
from tandem.router.storage.batches.turns import LONGEST_REST_S, REST_S, TURN_S, OpenBatch, Turns


def test_it_grows_in_a_gap_up_to_the_limit() -> None:
    pace, now_s = Pace(3), 0.0
    allowed: list[int] = []
    for _ in range(30):
        allowed.append(pace.look(now_s, 0, allowed[-1] if allowed else 0))
        now_s += 0.1
    assert allowed[0] == 1
    assert allowed[-1] == 3
    assert all(later - earlier in (0, 1) for earlier, later in itertools.pairwise(allowed))


def test_it_does_not_grow_beyond_what_is_used() -> None:
    pace = Pace(8)
    for look in range(100):
        assert pace.look(look * GROW_S, 0, 0) == 1


def test_who_waits_stops_new_ones_at_once_and_running_ones_in_time() -> None:
    pace = Pace(4)
    now_s = 0.0
    for _ in range(10):
        pace.look(now_s, 0, 4)
        now_s += GROW_S
    assert pace.look(now_s, 0, 4) == 4
    assert pace.look(now_s, 1, 3) == 3  # one has ended; its place is not filled
    assert pace.look(now_s + YIELD_S / 2, 1, 3) == 3
    for step in range(1, 4):
        assert pace.look(now_s + step * YIELD_S, 1, 4 - step) == 3 - step
    assert pace.look(now_s + 9 * YIELD_S, 5, 0) == 0
    assert pace.look(now_s + 9 * YIELD_S + 0.1, 0, 0) == 1  # the gap: from one on again


@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=60))
def test_bounds(limit: int, looks: list[tuple[float, int]]) -> None:
    """Never more than the limit; while a client waits never more than run; never stuck at none in a gap."""
    pace, running, now_s = Pace(limit), 0, 0.0
    for pause_s, waits in looks:
        now_s += pause_s
        allowed = pace.look(now_s, waits, running)
        assert 0 <= allowed <= limit
        assert allowed <= running if waits else allowed >= 1
        running = allowed


@dataclass
class _Flight:
    started_s: float
    prefill: str | None
    decode: str
    is_background: bool = False
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    plan: Any = field(init=False)

    def __post_init__(self) -> None:
        self.plan = SimpleNamespace(prefill=self.prefill, decode=self.decode)


def link(worker: str, queued: int, role: RoleName = RoleName.PREFILL) -> Any:
    facts, load = SimpleNamespace(role=role), SimpleNamespace(queued_requests=queued)
    return SimpleNamespace(worker=worker, facts=facts, load=load)


def count(flights: list[_Flight], links: list[Any], now_s: float = 100.0) -> int:
    return waiting(cast(Any, flights), links, now_s)


def test_who_waits() -> None:
    old, young = 100.0 - 2 * GRACE_S, 100.0 - GRACE_S / 2
    assert count([_Flight(old, "p", "d"), _Flight(old, None, "d")], []) == 2
    assert count([_Flight(young, "p", "d")], []) == 0
    assert count([_Flight(old, "p", "d", prefill_started_s=99.9)], []) == 0
    assert count([_Flight(old, "p", "d", first_token_s=99.9)], []) == 0
    assert count([_Flight(old, "p", "d", is_background=True)], []) == 0


def test_what_other_routers_have_waiting_is_told_from_our_own() -> None:
    ours = [_Flight(0.0, "p", "d", is_background=True), _Flight(0.0, None, "m", is_background=True)]
    assert count(ours, [link("p", 1), link("m", 1, RoleName.MIXED)]) == 0
    assert count(ours, [link("p", 3), link("m", 1, RoleName.MIXED)]) == 2
    assert count(ours, [link("d", 9, RoleName.DECODE)]) == 0
    down = SimpleNamespace(worker="x", facts=None, load=SimpleNamespace(queued_requests=5))
    assert count([], [down]) == 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_in_turn() -> None:
    slots = Slots()
    order: list[str] = []

    async def batch(name: str) -> None:
        for _ in range(3):
            slot = await slots.take("t", 1)
            order.append(name)
            await asyncio.sleep(0)
            slots.give_back(slot)

    async with asyncio.TaskGroup() as group:
        for name in "ab":
            group.create_task(batch(name))
        await settle()
        assert not order
        slots.allow(1)
    assert order == ["a", "b"] * 3
    assert slots.running == 0


async def test_who_asks_more_often_gets_no_more() -> None:
    """Seven times as many of one tenant as of another's: each tenant has half of the places."""
    slots = Slots()
    begun = Counter[str]()

    async def batch(tenant: str) -> None:
        while begun.total() < 300:
            slot = await slots.take(tenant, 200)
            begun[tenant] += 1
            await asyncio.sleep(0)
            slots.give_back(slot)

    async with asyncio.TaskGroup() as group:
        for tenant in "a" * 28 + "b" * 4:
            group.create_task(batch(tenant))
        await settle()
        slots.allow(2)
    assert min(begun.values()) > 0.4 * begun.total(), begun


async def test_the_youngest_is_taken_back() -> None:
    slots = Slots()
    slots.allow(2)
    taken = [await slots.take("t", 1), await slots.take("t", 1)]
    work = [asyncio.create_task(slot.run(asyncio.Event().wait())) for slot in taken]
    await settle()
    slots.allow(1)
    with pytest.raises(RevokedError):
        await work[1]
    assert not work[0].done()
    work[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await work[0]


async def test_taken_back_before_its_work_began() -> None:
    slots = Slots()
    slots.allow(1)
    slot = await slots.take("t", 1)
    slots.allow(0)
    with pytest.raises(RevokedError):
        await slot.run(asyncio.Event().wait())
    slots.give_back(slot)
    assert slots.running == 0


async def test_what_fails_and_what_ends_in_a_place() -> None:
    async def fail() -> None:
        raise OSError("no")

    async def answer() -> int:
        return 7

    slot = BatchSlot()
    assert await slot.run(answer()) == 7
    with pytest.raises(OSError, match="no"):
        await slot.run(fail())


async def test_who_leaves_the_queue_takes_no_place_along() -> None:
    slots = Slots()
    first = asyncio.create_task(slots.take("t", 1))
    second = asyncio.create_task(slots.take("t", 1))
    await settle()
    slots.allow(1)  # the first has been given its place, and leaves before it notices
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert isinstance(await second, BatchSlot)
    assert slots.running == 1
    third = asyncio.create_task(slots.take("t", 1))
    await settle()
    third.cancel()
    await settle()
    slots.allow(9)
    assert slots.running == 1


def opened(**tenants: int) -> dict[str, OpenBatch]:
    """Return so many batches of each tenant, called a0, a1 …, each tenant's older than the next one's."""
    return {
        f"{tenant}{number}": OpenBatch(tenant, 1000 * place + number)
        for place, (tenant, count) in enumerate(tenants.items())
        for number in range(count)
    }


def test_tenants_take_turns_and_a_tenants_own_go_by_age() -> None:
    assert Turns(6).begin(opened(a=9, b=2, c=9), 0.0) == ["a0", "b0", "c0", "a1", "b1", "c1"]
    backwards = dict(reversed(opened(a=3).items()))
    assert Turns(2).begin(backwards, 0.0) == ["a0", "a1"]


def test_eight_poisoned_batches_keep_nobody() -> None:
    turns, both = Turns(8), opened(a=8, b=1)
    assert len(turns.begin(opened(a=8), 0.0)) == 8
    for number in range(8):
        assert turns.failed(f"a{number}", 1.0) == REST_S
    assert turns.begin(both, 1.0) == ["b0"]


def test_trouble_comes_after_all_others_of_its_tenant_and_rests_ever_longer() -> None:
    turns, batches = Turns(1), opened(a=3)
    assert turns.begin(batches, 0.0) == ["a0"]
    turns.failed("a0", 0.0)
    assert turns.begin(batches, 9.0) == ["a1"]
    turns.ended("a1")
    assert turns.begin(batches, 9.0) == ["a1"]  # it is the oldest that is well
    rests = [turns.failed("a1", 10.0) for _ in range(12)]
    assert rests[:3] == [REST_S, 2 * REST_S, 4 * REST_S]
    assert rests[-1] == LONGEST_REST_S
    assert turns.begin({"a1": batches["a1"]}, 10.0 + LONGEST_REST_S - 0.1) == []
    assert turns.begin({"a1": batches["a1"]}, 10.0 + LONGEST_REST_S) == ["a1"]
    turns.ended("a1")
    assert turns.failed("a1", 500.0) == REST_S  # it was well in between


def test_outages_do_not_add_up() -> None:
    turns, batches = Turns(1), opened(a=1)
    for second in range(0, 100, 3):
        assert turns.begin(batches, float(second)) == ["a0"]
        turns.cut_off("a0", float(second))


def test_a_run_ends_after_its_turn_for_who_has_fewer_places() -> None:
    turns, both = Turns(4), opened(a=5, b=1)
    turns.begin(opened(a=5), 0.0)
    assert turns.leave(TURN_S) == []  # no run leaves for one of the same tenant
    assert turns.begin(both, TURN_S - 1) == []
    assert turns.leave(TURN_S - 1) == []
    assert turns.leave(TURN_S) == ["a0"]
    assert turns.begin(both, TURN_S) == ["b0"]
    assert turns.leave(3 * TURN_S) == []
    turns.ended("a0")
    turns.ended("b0")
    assert turns.begin(opened(a=5), 3 * TURN_S) == ["a0"]  # the oldest goes on first


def test_one_that_leaves_is_not_begun_again_before_it_ended() -> None:
    turns = Turns(1)
    turns.begin(opened(a=1), 0.0)
    turns.begin(opened(a=1, b=1), 1.0)
    assert turns.leave(TURN_S) == ["a0"]
    assert turns.begin(opened(a=1, b=1), TURN_S) == ["b0"]
    turns.ended("b0")
    assert turns.begin(opened(a=1), TURN_S) == []
    turns.ended("a0")
    assert turns.begin(opened(a=1), TURN_S) == ["a0"]


@pytest.mark.parametrize("tenants", [2, 5, 20])
def test_everybody_has_as_much_time(tenants: int) -> None:
    """A tenant that leaves many batches here gets no more than one that leaves few."""
    rng = random.Random(tenants)
    batches = opened(**{f"t{n}x": rng.randint(4, 40) for n in range(tenants)})
    turns, spent = Turns(4), Counter[str]()
    running: set[str] = set()
    for look in range(400):
        now_s = look * TURN_S / 2
        for batch in turns.leave(now_s):
            running.discard(batch)
            turns.ended(batch)
        running.update(turns.begin(batches, now_s))
        assert len(running) == min(4, len(batches))
        spent.update(batches[batch].tenant for batch in running)
    assert min(spent.values()) > 0.8 * max(spent.values())
    assert len(spent) == tenants
