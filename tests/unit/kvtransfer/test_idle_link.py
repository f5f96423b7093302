"""A link without anything to send leaves its thread alone, but for what time alone makes due."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Rank, WorkerId
from tandem.kvtransfer.peer_link import IDLE_S, REST_S, LinkKey, PeerLink


class Jobs:
    """None ever comes, until `rounds` waits were for nothing."""

    def __init__(self, rounds: int) -> None:
        self.waited_s: list[float] = []
        self._rounds = rounds

    def get(self, timeout: float) -> None:
        if len(self.waited_s) == self._rounds:
            return
        self.waited_s.append(timeout)
        raise queue.Empty


class Care:
    def __init__(self, *, is_pending: bool) -> None:
        self.is_pending, self.attended = is_pending, 0

    def is_overdue(self) -> bool:
        return False

    def attend(self, line: object) -> None:
        self.attended += 1


class Meter:
    def __init__(self, *, is_busy: bool) -> None:
        self.is_busy = is_busy


@pytest.mark.parametrize(
    ("is_busy", "is_pending", "waits", "attended"),
    [
        (False, False, [IDLE_S, REST_S, REST_S], 3),
        (False, True, [IDLE_S, IDLE_S, IDLE_S], 3),
        (True, False, [IDLE_S, IDLE_S, IDLE_S], 0),
    ],
    ids=["idle", "measured again", "an answer is due"],
)
def test_how_long_a_link_sleeps(is_busy: bool, is_pending: bool, waits: list[float], attended: int) -> None:
    link: Any = PeerLink(
        LinkKey(WorkerId("d0"), Rank(0), ()), on_reply=lambda *_: None, on_lost=lambda *_: None,
        on_broken=lambda *_: None, clock=ManualClock(),
    )  # fmt: skip
    link._jobs, link._meter, link._care = Jobs(3), Meter(is_busy=is_busy), Care(is_pending=is_pending)
    assert link._next_job(None) is None
    assert link._jobs.waited_s == waits
    assert link._care.attended == attended
