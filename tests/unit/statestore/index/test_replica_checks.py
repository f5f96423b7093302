"""A replica's handling of heartbeats and of missed events: when it reads again, and how soon."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.events import NOTHING, Position
from tandem.statestore.index.replica import IndexReplica, ReplicaCounters
from tandem.statestore.keys import Keys

W = WorkerId("w1")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def replica(clock: ManualClock) -> IndexReplica:
    redis: Any = None  # nothing is read here
    found = IndexReplica(redis, Keys("test"), clock=clock)
    found.set_workers({W: Incarnation(1)})
    follower = found._followers[W]
    assert follower.must_read, "nothing was read yet"
    follower.must_read = False
    return found


def heard(replica: IndexReplica, *said: Position) -> ReplicaCounters:
    for position in said:
        replica._compare(replica._followers[W], position)
    return replica.counters


@pytest.mark.parametrize("at", [NOTHING, Position(1, 9, 5), Position(7, 9, 5)])
def test_what_is_on_its_way_is_missed_when_nothing_came_until_the_next_heartbeat(
    replica: IndexReplica, at: Position
) -> None:
    follower, ahead = replica._followers[W], at._replace(seq=at.seq + 1)
    follower.at = at
    assert heard(replica, ahead) == ReplicaCounters()
    assert heard(replica, at, ahead) == ReplicaCounters(), "it agreed in between"
    follower.at = ahead  # it came
    assert heard(replica, at._replace(seq=at.seq + 3)) == ReplicaCounters()
    assert not follower.must_read
    assert heard(replica, at._replace(seq=at.seq + 4)) == ReplicaCounters(gaps=1)
    assert follower.must_read


def test_heartbeats_that_are_late_say_nothing(replica: IndexReplica) -> None:
    replica._followers[W].at = Position(7, 9, 5)
    assert heard(replica, Position(6, 8, 4), Position(6, 8, 4)) == ReplicaCounters()
    assert not replica._followers[W].must_read


@pytest.mark.parametrize("said", [Position(7, 8, 5), Position(7, 10, 5), Position(7, 9, 4), Position(7, 9, 6)])
def test_other_blocks_at_the_same_entry_are_a_mismatch(replica: IndexReplica, said: Position) -> None:
    replica._followers[W].at = Position(7, 9, 5)
    assert heard(replica, said) == ReplicaCounters(mismatches=1)
    assert replica._followers[W].must_read


def test_who_is_distrusted_is_read_soon_then_ever_later_until_it_agrees(
    replica: IndexReplica, clock: ManualClock
) -> None:
    follower = replica._followers[W]
    delays = []
    for _ in range(9):
        replica._schedule_resync(follower)
        delays.append(follower.read_at_s - clock.now_s())
        clock.advance(3.0)
    assert delays == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    heard(replica, follower.at)
    replica._schedule_resync(follower)
    assert follower.read_at_s - clock.now_s() == pytest.approx(0.05)
