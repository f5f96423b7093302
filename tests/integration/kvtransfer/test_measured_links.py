"""Links chosen by measurement over real transports: fallbacks that show, moves away from a link that slowed down."""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId, Incarnation, Rank
from tandem.core.link_speed import LinkSpeed
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.events import SendCompleted, Verified
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.link_speeds import LinkSpeeds
from tandem.kvtransfer.receiver_core import ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.shm_listener import ShmListener
from tests.integration.kvtransfer.faults import Proxy
from tools.waiting import wait_for

G0 = GroupId(0)
ALL = ("shm", "tcp", "grpc")
ELSEWHERE = "another-boot.1:1.elsewhere"


class Throttle(Proxy):
    """A wire that a test can make slow."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.bytes_per_s = 0.0
        self._over = threading.Event()
        super().__init__(endpoint)

    def close(self) -> None:
        self._over.set()
        super().close()

    def _passed(self, data: bytes, *, to_receiver: bool) -> bytes:
        if self.bytes_per_s and to_receiver:
            self._over.wait(len(data) / self.bytes_per_s)
        return data


@pytest.fixture
def speeds() -> LinkSpeeds:
    return LinkSpeeds(MonotonicClock())


def ids(numbers: range) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


def transfer(rig: Any, sender: Any, receiver: Any, source: Any, target: Any, endpoints: Any, blocks: int = 8) -> Any:
    """Move blocks; the ticket, once both ends are through."""
    ticket = rig.ticket(endpoints, {0: range(blocks)})
    receiver.expect(ticket)
    sender.open(ticket)
    rig.push_all(sender, ticket, range(blocks), range(blocks))
    assert isinstance(target.event(), Verified)
    event = source.event()
    assert isinstance(event, SendCompleted), event
    receiver.admit(ticket.transfer)
    return ticket


def test_all_are_measured_on_first_use_and_the_next_worker_measures_nothing(any_rig: Any, speeds: LinkSpeeds) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=ALL)
    sender = any_rig.sender(source, preference="auto", speeds=speeds)
    transfer(any_rig, sender, receiver, source, target, receiver.endpoints())
    assert [target.block(0, b) for b in range(8)] == [source.block(0, b) for b in range(8)]
    rows = {row.transport: row for row in speeds.rows()}
    assert set(rows) == set(ALL)
    assert all(row.bytes_per_s > 1e6 and 0 < row.latency_s < 1 and not row.failure for row in rows.values())
    (link,) = sender.links()
    assert (link.from_host, link.to_host, link.rank) == (host_id(), host_id(), 0)
    assert link.bytes_per_s == rows[link.transport].bytes_per_s
    assert "fastest of shm, tcp, grpc" in link.reason
    probes = receiver.counters()["probes"]
    assert probes > 0
    other_source = any_rig.side(seed=2)
    other = any_rig.sender(other_source, preference="auto", speeds=speeds)
    transfer(any_rig, other, receiver, other_source, target, receiver.endpoints())
    assert receiver.counters()["probes"] == probes
    assert {row.transport for row in speeds.take_news()} == set(ALL)


def test_measuring_fails_no_transfer_that_was_promised_before_it(any_rig: Any, speeds: LinkSpeeds) -> None:
    """Connections come and go while tickets wait that their sender has not announced yet."""
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=ALL)
    sender = any_rig.sender(source, preference="auto", speeds=speeds)
    waiting = [any_rig.ticket(receiver.endpoints(), {0: range(n, n + 1)}) for n in range(20, 25)]
    for ticket in waiting:
        receiver.expect(ticket)
    transfer(any_rig, sender, receiver, source, target, receiver.endpoints())
    for ticket in waiting:
        sender.open(ticket)
        sender.push(ticket.transfer, G0, ids(range(1)), tuple(ticket.groups[0].blocks), range(4))
        sender.finish(ticket.transfer)
        assert isinstance(target.event(), Verified)
        assert isinstance(source.event(), SendCompleted)


def test_a_receiver_that_refuses_shm_is_reached_over_tcp_with_a_warning(
    any_rig: Any, speeds: LinkSpeeds, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=ALL)
    intake = ReceiverCore(
        incarnation=Incarnation(22), rank=Rank(0), pools=target.pools, on_event=target.events.put,
        clock=MonotonicClock(),
    )  # fmt: skip
    refusing = ShmListener(intake, ClusterSecret(b"of another cluster"), Rank(0), tmp_path)
    refusing.start()
    try:
        endpoints = [refusing.endpoint() if e.transport == "shm" else e for e in receiver.endpoints()]
        speeds.learn([  # so that noise cannot choose between the other two
            LinkSpeed(from_host=host_id(), to_host=host_id(), transport=name, peer="d7", bytes_per_s=rate)
            for name, rate in (("tcp", 2e9), ("grpc", 1e9))
        ])  # fmt: skip
        sender = any_rig.sender(source, preference="auto", speeds=speeds)
        with caplog.at_level(logging.INFO):
            transfer(any_rig, sender, receiver, source, target, endpoints)
    finally:
        refusing.close()
    (link,) = sender.links()
    assert link.transport == "tcp"
    assert [why.partition(":")[0] for why in link.unused] == ["shm failed"]
    assert "shm failed" in link.reason
    warnings = [r for r in caplog.records if r.message == "transfer_faster_link_unused"]
    assert [w.levelno for w in warnings] == [logging.WARNING]
    assert {row.transport for row in speeds.rows() if row.failure} == {"shm"}


@pytest.fixture
def slow_wire(any_rig: Any) -> Iterator[Callable[[Any], tuple[Throttle, list[Endpoint]]]]:
    """A receiver on another host, with tcp through a throttle."""
    made: list[Throttle] = []

    def build(receiver: Any) -> tuple[Throttle, list[Endpoint]]:
        by_name = {e.transport: replace(e, host=ELSEWHERE) for e in receiver.endpoints()}
        made.append(Throttle(by_name["tcp"]))
        return made[0], [made[0].endpoint, by_name["grpc"]]

    yield build
    for wire in made:
        wire.close()


def known(speeds: LinkSpeeds, transport: str) -> float:
    row = speeds.latest((host_id(), ELSEWHERE, transport))
    return row.bytes_per_s if row is not None else 0.0


def test_a_link_that_slowed_down_is_measured_again_and_new_transfers_move(
    any_rig: Any, speeds: LinkSpeeds, slow_wire: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=("tcp", "grpc"))
    wire, endpoints = slow_wire(receiver)
    speeds.learn([
        LinkSpeed(from_host=host_id(), to_host=ELSEWHERE, transport=name, peer="d7", bytes_per_s=rate, latency_s=1e-4)
        for name, rate in (("tcp", 2e9), ("grpc", 5e8))
    ])  # fmt: skip
    sender = any_rig.sender(source, preference="auto", speeds=speeds)
    transfer(any_rig, sender, receiver, source, target, endpoints)
    assert sender.links()[0].transport == "tcp"
    half = any_rig.ticket(endpoints, {0: range(40, 42)})  # half of it is sent before the move
    receiver.expect(half)
    sender.open(half)
    sender.push(half.transfer, G0, ids(range(40, 41)), ids(range(40, 41)), range(4))

    wire.bytes_per_s = 2e7
    with caplog.at_level(logging.INFO):
        for _ in range(34):
            transfer(any_rig, sender, receiver, source, target, endpoints, blocks=16)
        wait_for(lambda: any(link.transport == "grpc" for link in sender.links()))
    assert known(speeds, "tcp") < 1e8
    assert known(speeds, "tcp") < known(speeds, "grpc") != 5e8, "measured anew, too"
    events = {r.message: vars(r)["fields"] for r in caplog.records if r.message.startswith("transfer_link_")}
    assert events["transfer_link_slow"]["measured"] == "2.00 GB/s"
    assert events["transfer_link_slow"]["achieved"].endswith("MB/s")
    assert events["transfer_link_moved"]["to"] == "grpc"

    transfer(any_rig, sender, receiver, source, target, endpoints)
    assert {link.transport for link in sender.links()} == {"tcp", "grpc"}  # the open one stays where it is
    wire.bytes_per_s = 0.0
    any_rig.push_all(sender, half, range(41, 42), range(41, 42))
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert [target.block(0, b) for b in (40, 41)] == [source.block(0, b) for b in (40, 41)]
    assert [link.transport for link in sender.links()] == ["grpc"]
    (moved,) = sender.links()
    assert moved.unused[0].startswith("tcp measured")


def test_a_forced_transport_is_measured_again_and_stays(any_rig: Any, speeds: LinkSpeeds, slow_wire: Any) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=("tcp", "grpc"))
    wire, endpoints = slow_wire(receiver)
    sender = any_rig.sender(source, preference="tcp", speeds=speeds)
    transfer(any_rig, sender, receiver, source, target, endpoints)
    first = known(speeds, "tcp")
    assert first > 0.0
    assert known(speeds, "grpc") == 0.0
    wire.bytes_per_s = min(1e7, first / 20)  # as fast as the machine lets it, and far slower

    def is_measured_again() -> bool:  # one measurement may be lost to a machine that was busier at first
        for _ in range(34):
            transfer(any_rig, sender, receiver, source, target, endpoints, blocks=8)
        return known(speeds, "tcp") < first / 2

    wait_for(is_measured_again)
    transfer(any_rig, sender, receiver, source, target, endpoints)
    (link,) = sender.links()
    assert (link.transport, link.reason, link.unused) == ("tcp", "configured", ())
    assert known(speeds, "grpc") == 0.0


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc", "gloo"])
def test_every_transport_can_be_measured(any_rig: Any, speeds: LinkSpeeds, name: str) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=(name,))
    sender = any_rig.sender(source, preference=name, speeds=speeds)
    transfer(any_rig, sender, receiver, source, target, receiver.endpoints())
    (row,) = speeds.rows()
    assert (row.transport, row.failure, row.peer) == (name, "", "d0")
    assert row.bytes_per_s > 1e6


def test_closing_a_sender_while_it_measures_does_not_wait_for_the_end_of_it(any_rig: Any, speeds: LinkSpeeds) -> None:
    source, target = any_rig.side(seed=1), any_rig.side()
    receiver = any_rig.receiver(target, transports=ALL)
    sender = any_rig.sender(source, preference="auto", speeds=speeds)
    ticket = any_rig.ticket(receiver.endpoints())
    receiver.expect(ticket)
    sender.open(ticket)
    sender.close()
    assert source.event().reason == "the sender was closed"
    assert all(not row.failure for row in speeds.rows())  # no link failed
