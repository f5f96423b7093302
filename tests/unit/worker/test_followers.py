"""Rank 0 receives reports even if followers leave commands unread: failures elsewhere are cancelled without a wait for
room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import Attempt, Incarnation, Rank, RequestId, TransferId, WorkerId
from tandem.core.kv_layout import KVLayout
from tandem.kvtransfer.events import Failed, SendFailed
from tandem.kvtransfer.ticket import Ticket
from tandem.worker import followers as followers_module
from tandem.worker.commands import CancelReceiving, CancelSending, Expect, Joiner, decode
from tandem.worker.follower import Reporter
from tandem.worker.followers import Followers
from tandem.worker.group_receiver import GroupReceiver
from tandem.worker.group_sender import GroupSender
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
