"""The bytes that may be under way on a link with one window, and the time of a receiver's acknowledgements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tandem.core.ids import Attempt, Incarnation, Rank, TransferId
from tandem.kvtransfer.frame import MAX_PAYLOAD_BYTES, Frame, FrameKind, FrameReply, ReplyKind
from tandem.kvtransfer.transports.base import WINDOW_BYTES, LinkClosedError
from tandem.kvtransfer.transports.flow_control import REPORT_BYTES, ReceiverCredit, RingCredit, SenderWindow
from tandem.kvtransfer.transports.payload_ring import largest_payload
from tools.waiting import wait_for

ACK = FrameReply(kind=ReplyKind.ACK)


def frame(size: int = 0, kind: FrameKind = FrameKind.DATA) -> Frame:
    return Frame(
        kind=kind, transfer=TransferId(1), attempt=Attempt(1), source_incarnation=Incarnation(1),
        dest_incarnation=Incarnation(2), source_rank=Rank(0), source_ranks=1, dest_rank=Rank(0), payload_bytes=size,
    )  # fmt: skip


@contextmanager
def waiting(window: SenderWindow, size: int) -> Iterator[list[str]]:
    """A thread that waits for room; what came of it is in the list afterwards."""
    before, outcome = window.stalls, list[str]()

    def wait() -> None:
        try:
            window.wait_for(size)
            outcome.append("room")
        except LinkClosedError:
            outcome.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: window.stalls == before + 1)
    assert outcome == []
    yield outcome
    thread.join()


def test_a_window_that_is_just_full_keeps_nobody_waiting() -> None:
    window = SenderWindow(10)
    window.wait_for(10)
    window.send(10)
    window.credit(10)
    window.wait_for(10)
    window = SenderWindow(10)
    window.send(10)
    window.credit(4)
    window.wait_for(4)
    assert window.stalls == 0
    with waiting(window, 5) as outcome:
        window.credit(5)
    assert outcome == ["room"]


@pytest.mark.parametrize("said", [[3], [6, 3]], ids=["less than before", "out of order"])
def test_what_was_taken_once_is_not_taken_back(said: list[int]) -> None:
    window = SenderWindow(10)
    window.send(10)
    window.credit(6)
    for taken in said:
        window.credit(taken)
    window.wait_for(6)
    with waiting(window, 7) as outcome:
        window.credit(7)
    assert outcome == ["room"]


def test_a_receiver_that_claims_more_than_was_sent_gives_no_more_room() -> None:
    window = SenderWindow(10)
    window.send(4)
    window.credit(1000)
    window.send(10)
    with waiting(window, 1) as outcome:
        window.credit(5)
    assert outcome == ["room"]


def test_who_waits_learns_that_the_link_was_closed() -> None:
    window = SenderWindow(10)
    window.send(10)
    with waiting(window, 1) as outcome:
        window.close()
    assert outcome == ["closed"]
    calls: list[Callable[[int], None]] = [window.wait_for, window.send]
    for call in calls:
        with pytest.raises(LinkClosedError, match="closed"):
            call(0)
    assert window.stalls == 1, "a closed link stalls nobody"


def test_a_mere_ack_waits_until_much_was_taken_and_says_all_of_it() -> None:
    credit = ReceiverCredit()
    for times in (1, 2):
        assert credit.settle(frame(REPORT_BYTES - 1), ACK) is None
        assert credit.settle(frame(1), ACK) == FrameReply(kind=ReplyKind.ACK, consumed=times * REPORT_BYTES)
    assert credit.settle(frame(5), ACK) is None
    assert credit.settle(frame(6), FrameReply(kind=ReplyKind.DONE)) == FrameReply(
        kind=ReplyKind.DONE, consumed=2 * REPORT_BYTES + 11
    )
    assert credit.settle(frame(0, FrameKind.FINISH), ACK) == FrameReply(
        kind=ReplyKind.ACK, consumed=2 * REPORT_BYTES + 11
    )


def test_a_sender_that_waits_is_always_told() -> None:
    """The window is full, the next frame the largest: the unacknowledged bytes are less than the rest of the window."""
    assert REPORT_BYTES + MAX_PAYLOAD_BYTES <= WINDOW_BYTES


def test_a_ring_is_told_free_when_what_is_untold_could_keep_the_sender_waiting() -> None:
    ring_bytes = 1 << 16
    untold = ring_bytes - 2 * largest_payload(ring_bytes)
    assert untold == 0
    assert RingCredit(ring_bytes).settle(frame(1), 0, ACK) == FrameReply(kind=ReplyKind.ACK, consumed=1)
    ring_bytes = 3 * largest_payload(1 << 30)
    untold = ring_bytes - 2 * largest_payload(ring_bytes)
    credit = RingCredit(ring_bytes)
    assert credit.settle(frame(10), 0, ACK) is None
    assert credit.settle(frame(10), untold - 11, ACK) is None
    told = credit.settle(frame(10), untold - 10, ACK)
    assert told is not None
    assert told.consumed == untold
    assert credit.settle(frame(0, FrameKind.OPEN), 7, ACK) is None
    assert credit.settle(frame(0, FrameKind.FINISH), 7, ACK) == FrameReply(kind=ReplyKind.ACK, consumed=untold)
    assert credit.settle(frame(9), untold, FrameReply(kind=ReplyKind.FAIL)) == FrameReply(
        kind=ReplyKind.FAIL, consumed=untold + 9
    )
