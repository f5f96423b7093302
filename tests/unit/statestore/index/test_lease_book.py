"""Test the lease book and checks of replicas."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Incarnation, WorkerId
from tandem.statestore.index.events import NOTHING, Position
from tandem.statestore.index.registry import LeaseBook, LeaseRow
from tandem.statestore.index.replica import IndexReplica, ReplicaCounters
from tandem.statestore.keys import Keys
from tandem.statestore.records import WorkerRecord, to_json

W = WorkerId("w1")
RECORD = WorkerRecord(worker=W, incarnation=Incarnation(11), role="prefill", address="h:1", model="m", fingerprint="f")


def row(beat: int, incarnation: int = 11) -> LeaseRow:
    record = replace(RECORD, incarnation=Incarnation(incarnation))
    return LeaseRow(incarnation, beat, to_json(record).encode())


@pytest.fixture
def book() -> LeaseBook:
    book = LeaseBook(lease_s=2.5)
    assert book.apply({W: row(1)}, 0.0)
    return book


def test_beats_keep_it_alive(book: LeaseBook) -> None:
    for beat in range(2, 20):
        assert not book.apply({W: row(beat)}, beat * 2.0)
    assert book.records == {W: RECORD}


def test_what_a_member_says_of_itself_may_change(book: LeaseBook) -> None:
    changed = replace(RECORD, state="draining")
    assert book.apply({W: LeaseRow(11, 2, to_json(changed).encode())}, 0.5)
    assert book.records == {W: changed}
    assert not book.apply({W: LeaseRow(11, 3, to_json(changed).encode())}, 1.0)
    assert not book.apply({W: LeaseRow(11, 4, b"{")}, 1.5), "what cannot be read changes nothing"
    assert not book.apply({W: LeaseRow(11, 5, to_json(replace(changed, worker=WorkerId("w2"))).encode())}, 2.0)
    assert book.records == {W: changed}


def test_a_missing_key_alone_is_no_lapse(book: LeaseBook) -> None:
    assert not book.apply({W: None}, 2.4)
    assert W in book.records
    assert book.apply({W: None}, 2.6)
    assert book.records == {}


def test_a_key_that_stands_without_new_beats_lapses_once(book: LeaseBook) -> None:
    assert book.apply({W: row(1)}, 2.6)
    assert not book.apply({W: row(1)}, 2.7)
    assert book.records == {}
    assert book.apply({W: row(2)}, 2.8)
    assert W in book.records


def test_beats_on_another_path_count(book: LeaseBook) -> None:
    book.note_beat(W, Incarnation(11), 2.0)
    assert not book.apply({W: None}, 4.4)
    book.note_beat(W, Incarnation(99), 4.4)
    assert book.apply({W: None}, 4.6)


def test_an_outage_is_no_lapse_and_gives_a_lease_time_afterwards(book: LeaseBook) -> None:
    book.outage()
    assert not book.apply({W: None}, 100.0)
    assert not book.apply({W: None}, 102.4)
    assert W in book.records
    assert book.apply({W: None}, 102.6)


def test_another_incarnation_replaces_one_that_is_silent_at_once(book: LeaseBook) -> None:
    assert book.apply({W: row(0, incarnation=5)}, 1.1)
    assert book.records[W].incarnation == 5


def test_another_incarnation_has_to_beat_while_one_is_heard(book: LeaseBook) -> None:
    assert not book.apply({W: row(3, incarnation=5)}, 0.1)
    assert not book.apply({W: row(3, incarnation=5)}, 0.5)
    assert book.records[W].incarnation == 11
    assert book.apply({W: row(4, incarnation=5)}, 0.6)
    assert book.records[W].incarnation == 5


def test_nobody_comes_back_from_an_old_dump(book: LeaseBook) -> None:
    """Redis was away and came back with the row of an incarnation before this one, then with the row of this one."""
    book.apply({W: row(7)}, 1.0)
    book.outage()
    assert not book.apply({W: row(40, incarnation=3)}, 60.0)
    assert not book.apply({W: row(40, incarnation=3)}, 60.4)
    assert not book.apply({W: row(0)}, 60.5)  # registered again, as it found another incarnation in its place
    assert not book.apply({W: row(1)}, 61.0)
    assert book.records == {W: RECORD}
    assert book.apply({W: row(1)}, 64.0)
    for at_s in (64.1, 65.0):
        assert not book.apply({W: None}, at_s)
        assert not book.apply({W: row(1)}, at_s)
    assert book.records == {}


def test_whoever_was_replaced_does_not_come_back_when_the_successor_is_silent(
    book: LeaseBook,
) -> None:
    book.apply({W: row(7)}, 0.5)
    assert book.apply({W: row(0, incarnation=12)}, 2.0)
    assert book.apply({W: row(0, incarnation=13)}, 4.0)
    for at_s in (5.5, 6.0):  # nothing was received of the third one for more than a second
        assert not book.apply({W: row(7)}, at_s)
        assert not book.apply({W: row(0, incarnation=12)}, at_s + 0.1)
    assert book.records[W].incarnation == 13
    assert not book.apply({W: row(1, incarnation=13)}, 6.3)
    assert book.records[W].incarnation == 13


def test_two_old_dumps_are_no_sign_of_life(book: LeaseBook) -> None:
    """The second one is younger: its beats are more. In between, the row was the living one's, or missing."""
    between = (row(2), None, LeaseRow(0, 1, b"5"))
    for number, living in enumerate(between, 1):
        at_s = float(number)
        book.note_beat(W, Incarnation(11), at_s)
        assert not book.apply({W: row(10 * number, incarnation=5)}, at_s)
        assert not book.apply({W: living}, at_s + 0.1)
        assert not book.apply({W: row(10 * number + 5, incarnation=5)}, at_s + 0.2)
        assert not book.apply({W: row(2)}, at_s + 0.3)
    assert book.records == {W: RECORD}


def test_whoever_left_comes_back_only_alive(book: LeaseBook) -> None:
    assert not book.apply({W: LeaseRow(0, 1, b"12")}, 0.1)  # another one left, once
    assert book.apply({W: LeaseRow(0, 1, b"11")}, 0.1)
    assert not book.apply({W: row(5)}, 0.2)
    assert not book.apply({W: row(5)}, 0.7)
    assert book.records == {}
    assert book.apply({W: row(6)}, 1.2)


def test_whoever_leaves_is_gone_at_once(book: LeaseBook) -> None:
    assert book.apply({W: LeaseRow(0, 1, b"")}, 0.1)
    assert book.records == {}


def test_a_record_of_somebody_else_is_nobody(book: LeaseBook) -> None:
    other = WorkerId("w2")
    elsewhere = row(1), LeaseRow(12, 1, to_json(replace(RECORD, worker=other)).encode())
    for beat, strange in enumerate(elsewhere):
        assert not book.apply({W: row(2 + beat), other: strange}, 0.1)
        assert book.records == {W: RECORD}


def test_an_unreadable_record_is_nobody(book: LeaseBook) -> None:
    other = WorkerId("w2")
    assert not book.apply({W: row(2), other: LeaseRow(7, 1, b'{"worker": "w2"}')}, 0.1)
    assert set(book.records) == {W}


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
