"""Waiting transfers learn that their link cannot be made, for any reason; and behaviour when a link is busy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import Failed, Quiesced, SendFailed
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.peer_link import PeerLink
from tandem.kvtransfer.probed_connection import ProbedConnection
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports import dialer
from tandem.kvtransfer.transports.base import Link
from tandem.kvtransfer.transports.registry import find
from tests.integration.kvtransfer.rig import Rig
from tools.waiting import wait_for

G0 = GroupId(0)


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_dial_that_breaks_fails_what_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    def dial(*_: Any) -> Any:
        raise MemoryError("no room for a ring")

    monkeypatch.setattr(dialer, "TRANSPORTS", {"shm": replace(find("shm"), dial=dial)})
    rig = Rig("shm", tmp_path)
    try:
        source, target = rig.side(seed=1), rig.side()
        receiver = rig.receiver(target)
        sender = rig.sender(source, speeds=LinkSpeeds(MonotonicClock()) if is_measured else None)
        ticket = rig.ticket(receiver.endpoints())
        receiver.expect(ticket)
        sender.open(ticket)
        failed = source.event_within(rig.patience_s)
        assert isinstance(failed, SendFailed)
        assert "no room for a ring" in failed.reason
    finally:
        rig.close()


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_link_for_which_there_is_no_thread_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    released: list[Link] = []

    def dial(*arguments: Any) -> Any:
        link = find("shm").dial(*arguments)
        give_back = link.release

        def release() -> None:
            give_back()
            released.append(link)

        monkeypatch.setattr(link, "release", release)
        return link

    def start(_line: ProbedConnection) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(dialer, "TRANSPORTS", {"shm": replace(find("shm"), dial=dial)})
    monkeypatch.setattr(ProbedConnection, "start", start)
    rig = Rig("shm", tmp_path)
    try:
        source, target = rig.side(seed=1), rig.side()
        receiver = rig.receiver(target)
        sender = rig.sender(source, speeds=LinkSpeeds(MonotonicClock()) if is_measured else None)
        sender.open(rig.ticket(receiver.endpoints()))
        failed = source.event()
        assert isinstance(failed, SendFailed)
        assert "can't start new thread" in failed.reason
        sender.close()
        assert len(released) == 1
    finally:
        rig.close()


def test_a_transfer_without_a_thread_for_its_link_fails_at_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = PeerLink.start

    def start(link: PeerLink, *arguments: Any) -> None:
        if link.key.rank == 1:
            raise RuntimeError("can't start new thread")
        usual(link, *arguments)

    rig = Rig("shm", tmp_path)
    try:
        source, targets = rig.side(seed=1), [rig.side(tp=2) for _ in range(2)]
        receivers = [rig.receiver(target, rank=rank) for rank, target in enumerate(targets)]
        sender = rig.sender(source)

        def opened() -> Ticket:
            ticket = rig.ticket([endpoint for receiver in receivers for endpoint in receiver.endpoints()])
            for receiver in receivers:
                receiver.expect(ticket)
            sender.open(ticket)
            return ticket

        with monkeypatch.context() as patch:
            patch.setattr(PeerLink, "start", start)
            opened()
            failed = source.event()
            assert isinstance(failed, SendFailed)
            assert "can't start new thread" in failed.reason
            assert not sender.transfers()
            assert isinstance(targets[0].event(), Failed)  # it was informed that the sender gave up
        sender.cancel(opened().transfer)  # the next one finds its links
        assert isinstance(source.event(), Quiesced)
        assert {link.peer_rank for link in sender.links()} == {0, 1}
    finally:
        rig.close()


def test_a_link_is_not_busy_with_what_was_revoked_finished_and_then_given_up(tmp_path: Path) -> None:
    """To the end of a revoked transfer comes a mere ACK, and no answer ever."""
    rig = Rig("shm", tmp_path)
    try:
        source, target = rig.side(seed=1), rig.side()
        receiver, sender = rig.receiver(target), rig.sender(source)
        ticket, blocks = rig.ticket(receiver.endpoints()), tuple(map(BlockId, range(8)))
        receiver.expect(ticket)
        sender.open(ticket)
        source.pools[G0].read_gate.clear()
        sender.push(ticket.transfer, G0, blocks, blocks, range(4))
        assert source.pools[G0].reading.wait(rig.patience_s)
        assert receiver.revoke(ticket.transfer)
        sender.finish(ticket.transfer)
        source.pools[G0].read_gate.set()
        (link,) = sender._links.values()
        wait_for(lambda: link._writer.finished == ticket.transfer)
        assert link._meter.is_busy
        sender.cancel(ticket.transfer)
        assert isinstance(source.event(), Quiesced)
        wait_for(lambda: not link._meter.is_busy)
    finally:
        rig.close()
