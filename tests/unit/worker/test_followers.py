"""Test followers, and outcomes aggregated over ranks."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVLayout
from tandem.kvtransfer.events import Failed, Quiesced, ReceiverEvent, SendCompleted, SenderEvent, SendFailed, Verified
from tandem.kvtransfer.ticket import Ticket
from tandem.worker import followers as followers_module
from tandem.worker.commands import CancelReceiving, CancelSending, Expect, Joiner, decode
from tandem.worker.follower import Reporter
from tandem.worker.followers import Followers
from tandem.worker.group_transfers import GroupReceiver, GroupSender
from tandem.worker.outcome_aggregation import ReceiveAggregator, SendTally
from tandem.worker.reports import Counters, Expected
from tandem.workercore.message_ring import RingHandle, RingPair, RingReader, RingWriter
from tools.waiting import wait_for

NUMBER = TransferId(7)
TICKET = Ticket(
    transfer=NUMBER, request=RequestId("r"), attempt=Attempt(1), sender=WorkerId("p0"),
    sender_incarnation=Incarnation(1), receiver=WorkerId("d0"), receiver_incarnation=Incarnation(2), groups=(),
    endpoints=(), layout=KVLayout(groups=()),
)  # fmt: skip


class Local:
    """This rank's own end: it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Behind:
    """A follower that reports and does not get round to its commands; its ring is full."""

    def __init__(self) -> None:
        self.pair = RingPair(RingHandle.create("commands", 4096), RingHandle.create("reports"))
        self.lost: list[Exception] = []
        self.posted: list[object] = []
        self.followers = Followers([self.pair], self.lost.append)
        self.followers.start()
        self.reporter = Reporter(RingWriter(self.pair.reports))
        self._reader, self._joiner = RingReader(self.pair.commands), Joiner()

    def fill(self) -> None:
        for size in (64, 1):  # the last gap, too
            while self.followers._writers[0].try_write(bytes(size)):
                pass

    def obey(self) -> list[object]:
        """All commands since, as far as they are none of `fill`'s."""
        found: list[object] = []
        for data in self._reader.read_all():
            if any(data):
                whole = self._joiner.add(data)
                assert whole is not None
                found.append(decode(whole)[1])
        return found

    def obeys(self, command: object) -> bool:
        return command in self.obey()

    def hears(self) -> bool:
        return self.followers.counters() == [{"frames": 1}]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    monkeypatch.setattr(followers_module, "COMMAND_TIMEOUT_S", 3600.0)
    made = Behind()
    yield made
    made.obey()
    made.followers.close()
    made.pair.close()
    assert not made.lost


def test_a_transfer_that_fails_at_a_follower_is_cancelled_without_waiting(behind: Behind) -> None:
    local: Any = Local()
    sender = GroupSender(lambda on_event: local, behind.followers, behind.posted.append, ManualClock())
    sender.open(TICKET)
    behind.fill()
    behind.reporter.say(SendFailed(transfer=NUMBER, reason="a link"))
    behind.reporter.say(Counters({"frames": 1}))
    wait_for(behind.hears, 30)
    wait_for(lambda: behind.obeys(CancelSending(NUMBER)), 30)


def test_a_transfer_that_fails_at_one_end_is_cancelled_at_the_others_without_waiting(behind: Behind) -> None:
    local: Any = Local()
    receiver = GroupReceiver(lambda on_event: local, behind.followers, behind.posted.append)
    expecting = threading.Thread(target=receiver.expect, args=(TICKET,))
    expecting.start()
    wait_for(lambda: behind.obeys(Expect(TICKET)), 30)
    behind.reporter.say(Expected(NUMBER))
    expecting.join()
    behind.fill()
    behind.reporter.say(Failed(transfer=NUMBER, reason="a checksum"))
    behind.reporter.say(Counters({"frames": 1}))
    wait_for(behind.hears, 30)
    assert [type(event) for event in behind.posted] == [Failed]
    wait_for(lambda: behind.obeys(CancelReceiving(NUMBER, "rank 1 failed")), 30)
    assert behind.followers.ranks == (Rank(1),)


T = TransferId(7)
RANKS = (Rank(0), Rank(1), Rank(2), Rank(3))


def verified(at_s: float, size: int) -> Verified:
    return Verified(transfer=T, last_wire_s=at_s / 10, verified_at_s=at_s, bytes=size)


received = st.one_of(
    st.builds(verified, st.floats(0, 100), st.integers(0, 1000)),
    st.builds(Failed, transfer=st.just(T), reason=st.text(max_size=5)),
)
sent = st.one_of(
    st.builds(SendCompleted, transfer=st.just(T), bytes=st.integers(0, 1000)),
    st.builds(SendFailed, transfer=st.just(T), reason=st.text(max_size=5)),
    st.just(Quiesced(transfer=T)),
)


@given(st.permutations(RANKS), st.lists(received, min_size=4, max_size=4))
def test_receiver_tells_one_event(order: list[Rank], events: list[ReceiverEvent]) -> None:
    tally = ReceiveAggregator(RANKS)
    tally.expect(T)
    verdicts = [tally.note(rank, event) for rank, event in zip(order, events, strict=True)]
    told = [(place, verdict.report) for place, verdict in enumerate(verdicts) if verdict.report]
    failures = [place for place, event in enumerate(events) if isinstance(event, Failed)]
    assert len(told) == 1
    if failures:
        assert told == [(failures[0], events[failures[0]])], "the first failure, at once"
        assert [v.cancels_others for v in verdicts] == [place == failures[0] for place in range(4)]
    else:
        (place, report) = told[0]
        assert place == 3, "when the last rank has verified"
        assert isinstance(report, Verified)
        sizes = [event.bytes for event in events if isinstance(event, Verified)]
        last = max((event for event in events if isinstance(event, Verified)), key=lambda e: e.verified_at_s)
        assert (report.bytes, report.verified_at_s) == (sum(sizes), last.verified_at_s)
        assert report.last_wire_s == last.last_wire_s


@given(st.permutations(RANKS), st.lists(sent, min_size=4, max_size=4))
def test_sender_tells_one_event_when_nobody_reads_any_more(order: list[Rank], events: list[SenderEvent]) -> None:
    tally = SendTally(RANKS)
    tally.open(T)
    verdicts = [tally.note(rank, event) for rank, event in zip(order, events, strict=True)]
    assert [verdict.report is not None for verdict in verdicts] == [False, False, False, True]
    assert not tally.is_open(T)
    report = verdicts[3].report
    failures = [event for event in events if isinstance(event, SendFailed)]
    if failures:
        assert report == failures[0]
    elif Quiesced(transfer=T) in events:
        assert report == Quiesced(transfer=T)
    else:
        assert report == SendCompleted(
            transfer=T, bytes=sum(event.bytes for event in events if isinstance(event, SendCompleted))
        )
    assert sum(verdict.cancels_others for verdict in verdicts) <= 1


def test_a_rank_counts_once_and_only_while_the_transfer_is_known() -> None:
    tally = ReceiveAggregator(RANKS)
    assert tally.note(RANKS[0], verified(1, 1)).report is None
    tally.expect(T)
    for _ in range(9):
        assert tally.note(RANKS[0], verified(1, 1)).report is None
    tally.forget(T)
    assert [tally.note(rank, verified(1, 1)).report for rank in RANKS] == [None] * 4


def test_waits_until_every_rank_expects_or_one_failed() -> None:
    tally = ReceiveAggregator(RANKS[:2])
    tally.expect(T)
    tally.expected(RANKS[0], T)
    assert not tally.wait_expected(T, 0.0)
    other = threading.Thread(target=tally.expected, args=(RANKS[1], T))
    other.start()
    assert tally.wait_expected(T, 10)
    other.join()
    tally.expect(T)
    tally.note(RANKS[1], Failed(transfer=T, reason="it could not"))
    assert tally.wait_expected(T, 0.0)
