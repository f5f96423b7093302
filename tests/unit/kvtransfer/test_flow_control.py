"""The bytes that may be under way on a link, and the time of a receiver's acknowledgements.

Two accounts of one ring agree, never overlap what is under way, and never wait for each other for ever.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.frame import (
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
)
from tandem.kvtransfer.transports.base import WINDOW_BYTES, LinkClosedError
from tandem.kvtransfer.transports.flow_control import (
    REPORT_BYTES,
    ReceiverCredit,
    RingAccount,
    SenderWindow,
    SendGate,
    SendWindow,
)
from tandem.kvtransfer.transports.payload_ring import largest_payload, ring_credit
from tests.unit.kvtransfer.conftest import control
from tools.waiting import wait_for

SIZE, REPORT_EVERY, MAX_FRAMES = 64, 4, 16
ACK = FrameReply(kind=ReplyKind.ACK)


def frame(size: int = 0, kind: FrameKind = FrameKind.DATA) -> Frame:
    return control(kind=kind, payload_bytes=size)


@contextmanager
def waiting(window: SendGate, want: Callable[[], object]) -> Iterator[list[str]]:
    """A thread that waits for room; what came of it is in the list afterwards."""
    before, outcome = window.stalls, list[str]()

    def wait() -> None:
        try:
            want()
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
    with waiting(window, lambda: window.wait_for(5)) as outcome:
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
    with waiting(window, lambda: window.wait_for(7)) as outcome:
        window.credit(7)
    assert outcome == ["room"]


def test_a_receiver_that_claims_more_than_was_sent_gives_no_more_room() -> None:
    window = SenderWindow(10)
    window.send(4)
    window.credit(1000)
    window.send(10)
    with waiting(window, lambda: window.wait_for(1)) as outcome:
        window.credit(5)
    assert outcome == ["room"]


def test_who_waits_learns_that_the_link_was_closed() -> None:
    window = SenderWindow(10)
    window.send(10)
    with waiting(window, lambda: window.wait_for(1)) as outcome:
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
    assert ring_credit(ring_bytes).settle(frame(1), ACK, 0) == FrameReply(kind=ReplyKind.ACK, consumed=1)
    ring_bytes = 3 * largest_payload(1 << 30)
    untold = ring_bytes - 2 * largest_payload(ring_bytes)
    credit = ring_credit(ring_bytes)
    assert credit.settle(frame(10), ACK, 0) is None
    assert credit.settle(frame(10), ACK, untold - 11) is None
    told = credit.settle(frame(10), ACK, untold - 10)
    assert told is not None
    assert told.consumed == untold
    assert credit.settle(frame(0, FrameKind.OPEN), ACK, 7) is None
    assert credit.settle(frame(0, FrameKind.FINISH), ACK, 7) == FrameReply(kind=ReplyKind.ACK, consumed=untold)
    assert credit.settle(frame(9), FrameReply(kind=ReplyKind.FAIL), untold) == FrameReply(
        kind=ReplyKind.FAIL, consumed=untold + 9
    )


@given(st.lists(st.integers(0, SIZE // REPORT_EVERY), max_size=200))
def test_a_receiver_that_reports_a_quarter_at_a_time_never_starves_its_sender(sizes: list[int]) -> None:
    window, account = SendWindow(SIZE, MAX_FRAMES), RingAccount(SIZE)
    arrived: deque[tuple[int, int, int]] = deque()
    judged = unreported_bytes = unreported_frames = 0

    def judge() -> None:
        nonlocal judged, unreported_bytes, unreported_frames
        _offset, size, position = arrived.popleft()
        account.free(position)
        judged, unreported_bytes, unreported_frames = judged + 1, unreported_bytes + size, unreported_frames + 1
        if unreported_bytes >= SIZE // REPORT_EVERY or unreported_frames >= MAX_FRAMES // REPORT_EVERY:
            window.judged(judged)
            unreported_bytes = unreported_frames = 0

    for number, size in enumerate(sizes, 1):
        while not window._has_room(size):
            assert arrived, "the sender waits, and nothing is left to judge"
            judge()
        offset = window.reserve(size)
        assert window.commit(size) == number
        theirs, position = account.take(size)
        assert not size or theirs == offset
        assert offset + size <= SIZE
        for other, length, _ in arrived:
            assert offset + size <= other or other + length <= offset
        arrived.append((offset, size, position))
    assert window.stalls == 0


def test_a_sender_that_overfills_the_ring_is_refused() -> None:
    account = RingAccount(SIZE)
    assert account.take(40) == (0, 40)
    with pytest.raises(MalformedFrameError, match="window of 64"):
        account.take(40)
    account.free(40)
    assert account.take(40) == (0, 104)  # the rest behind 40 is skipped
    account.free(10_000)
    assert account.freed == 104


def test_a_claim_to_have_judged_more_than_was_sent_frees_no_more() -> None:
    window = SendWindow(SIZE, MAX_FRAMES)
    window.reserve(SIZE)
    window.commit(SIZE)
    window.judged(1_000)
    window.reserve(SIZE)
    window.commit(SIZE)
    assert not window._has_room(1)
    window.judged(2)
    assert window._has_room(SIZE)


@pytest.mark.parametrize("is_full_of_frames", [True, False])
def test_a_waiting_sender_goes_on_with_room_and_ends_with_the_link(is_full_of_frames: bool) -> None:
    window = SendWindow(SIZE, 1 if is_full_of_frames else MAX_FRAMES)
    window.reserve(SIZE)
    window.commit(SIZE)

    def want() -> None:
        assert window.reserve(0 if is_full_of_frames else 1) == 0

    with waiting(window, want) as outcome:
        window.judged(1)
    assert outcome == ["room"]
    window.commit(SIZE)
    with waiting(window, want) as outcome:
        window.close()
    assert outcome == ["closed"]
