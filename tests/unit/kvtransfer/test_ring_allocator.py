"""Two accounts of one ring agree, never overlap what is under way, and never wait for each other for ever."""

from __future__ import annotations

import queue
import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.frame import MalformedFrameError
from tandem.kvtransfer.transports.base import LinkClosedError
from tandem.kvtransfer.transports.ring_allocator import RingAccount, SendWindow

SIZE, REPORT_EVERY, MAX_FRAMES = 64, 4, 16


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
    told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def want() -> None:
        try:
            told.put(window.reserve(0 if is_full_of_frames else 1))
        except LinkClosedError as error:
            told.put(str(error))

    waiting = threading.Thread(target=want)
    waiting.start()
    window.judged(1)
    assert told.get(timeout=30) == 0
    waiting.join()
    window.commit(SIZE)
    waiting = threading.Thread(target=want)
    waiting.start()
    window.close()
    assert told.get(timeout=30) == "the link was closed"
    waiting.join()
