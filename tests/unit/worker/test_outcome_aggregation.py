"""One event for the role out of one a rank, in any order."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.ids import Rank, TransferId
from tandem.kvtransfer.events import Failed, Quiesced, ReceiverEvent, SendCompleted, SenderEvent, SendFailed, Verified
from tandem.worker.outcome_aggregation import ReceiveAggregator, SendTally

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
