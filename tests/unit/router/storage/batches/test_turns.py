"""Turns of batches: fair between tenants, oldest first within one, and trouble gives its turn to the next."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.router.storage.batches.turns import LONGEST_REST_S, REST_S, TURN_S, OpenBatch, Turns


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
