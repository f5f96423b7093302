"""Links over `gloo`: peers that announce a payload and stand still, read nothing or are cut off in the middle."""

import contextlib
import os
import signal
import socket
import threading
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest

from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId, Rank, WorkerId
from tandem.kvtransfer.events import Failed, Quiesced, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.frame import Frame, FrameKind, ReplyKind, encode
from tandem.kvtransfer.receiver_core import ReceiverCore
from tandem.kvtransfer.ticket import Ticket
from tandem.kvtransfer.transports import collective, collective_listener, gloo_communicator
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.collective import CollectiveLink
from tandem.kvtransfer.transports.collective_listener import _Connection
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.gloo_communicator import GlooCommunicator, Transfer
from tests.integration.kvtransfer.gloo_pair import Pair
from tests.unit.kvtransfer.conftest import control
from tools.ticket_json import as_json
from tools.waiting import wait_for

SIZE = 4 << 20
NEVER_S = 3600.0
G0 = GroupId(0)
BLOCKS = 512


@pytest.fixture
def rig(any_rig: Any) -> Any:
    any_rig.transport = "gloo"
    return any_rig


@contextlib.contextmanager
def served_deaf(rig: Any, pair: Pair, patience_s: float) -> Iterator[None]:
    """Serve a connection with a sender that reads nothing any more; wait for its end."""
    intake = ReceiverCore(
        incarnation=rig.RECEIVER, rank=Rank(0), pools=rig.side().pools, on_event=lambda _: None, clock=MonotonicClock()
    )
    peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host="h")
    theirs = pair.controls[1]
    for timeout_s, size in ((0.2, 1 << 16), (0.0, 1)):  # until nothing leaves any more, and then the last gap
        theirs.set_timeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            while True:
                theirs._socket.send(bytes(size))
    theirs.set_timeout(None)
    connection = _Connection("gloo", theirs, pair.receiver, intake, intake.connect(peer))
    serving = threading.Thread(target=connection.serve, daemon=True)
    serving.start()
    yield
    serving.join(patience_s)
    assert not serving.is_alive()


OPENING = encode(control())
"""The head of a frame that gets a reply at once."""


def test_a_sender_that_reads_no_replies_cannot_keep_an_ended_link(rig: Any, pair: Pair) -> None:
    """It hung up one way only: a reply to it has no room, and never gets any."""
    ours, theirs = pair.controls
    with served_deaf(rig, pair, rig.patience_s):
        ours.send(OPENING)
        wait_for(theirs._sending.locked)
        ours._socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("is_replying", [False, True])
def test_a_sender_that_reads_nothing_cannot_keep_a_link_that_is_closed_on_it(
    rig: Any, pair: Pair, is_replying: bool
) -> None:
    """The reason of its link's end cannot be sent to it, neither at once nor behind a reply that has no room."""
    ours, theirs = pair.controls
    with served_deaf(rig, pair, rig.patience_s):
        if is_replying:
            ours.send(OPENING)
            wait_for(theirs._sending.locked)
        ours.send(b"no frame")


def ids(numbers: Any) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


def test_a_rendezvous_has_an_end(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a step of it waits, as here, for ever."""

    def connect(control: ControlSocket, rank: int, size: int) -> Any:
        control.set_timeout(None)
        assert control.receive(1) == b""
        raise LinkClosedError("hung up")

    monkeypatch.setattr(collective_listener, "RENDEZVOUS_S", 0.05)
    receiver = rig.receiver(rig.side())
    (endpoint,) = receiver.endpoints()
    monkeypatch.setattr(receiver._listeners[0], "_connect", connect)
    peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host=endpoint.host)
    control = collective._dial_control("gloo", endpoint.address, peer, rig.secret)
    control.set_timeout(rig.patience_s)
    assert len(control.receive(100)) == collective.WINDOW.size
    assert control.receive(100) == b""
    control.release()


def frame_of(rig: Any, ticket: Ticket, kind: FrameKind, payload: bytes = b"") -> Frame:
    """A frame of `ticket`; a DATA frame brings all of block 0."""
    frame = control(kind=kind, transfer=ticket.transfer, attempt=ticket.attempt)
    if kind is not FrameKind.DATA:
        return frame
    return replace(
        frame, group=G0, layers=range(4), heads=range(4), blocks=ids([0]),
        payload_bytes=len(payload), payload_crc=zlib.crc32(payload), send_ns=1,
    )  # fmt: skip


def announced(rig: Any) -> tuple[Any, ...]:
    """A receiver that waits for the payload of a header that came: (target, receiver, ticket, link, replies, frame)."""
    target = rig.side()
    receiver = rig.receiver(target)
    ticket = rig.ticket(receiver.endpoints(), {0: [0]})
    receiver.expect(ticket)
    peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host="")
    link = CollectiveLink.dial("gloo", receiver.endpoints()[0].address, peer, rig.secret)
    rig._closers += [link.release, link.close]
    replies = link.replies()
    link.commit(frame_of(rig, ticket, FrameKind.OPEN), None)
    assert next(replies).kind is ReplyKind.ACK
    payload = b"\x07" * rig.DENSE.block_bytes()
    with link.reserve(len(payload)) as room:
        room[:] = payload
    data = frame_of(rig, ticket, FrameKind.DATA, payload)
    link._control.send(encode(data))
    return target, receiver, ticket, link, replies, data


def test_cancel_and_close_do_not_wait_for_an_announced_payload(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", NEVER_S)
    target, receiver, ticket, _link, replies, _data = announced(rig)
    receiver.cancel(ticket.transfer)
    receiver.close()
    assert not any(target.memory[G0])
    with pytest.raises(LinkClosedError):
        next(replies)


def test_a_cancelled_payload_is_taken_off_the_wire_and_dropped(rig: Any) -> None:
    target, receiver, ticket, link, replies, data = announced(rig)
    receiver.cancel(ticket.transfer)
    link._window.commit(data.payload_bytes)
    leaving = link._communicator.send(link._reserved, data.payload_bytes)
    leaving.wait()
    reply = next(replies)
    assert (reply.kind, reply.reason, reply.consumed) == (ReplyKind.FAIL, "fenced", 2)
    assert not any(target.memory[G0])
    again = rig.ticket(receiver.endpoints(), {0: [0]})
    receiver.expect(again)
    payload = b"\x09" * data.payload_bytes
    with link.reserve(len(payload)) as room:
        room[:] = payload
        link.commit(frame_of(rig, again, FrameKind.DATA, payload), room)
    assert isinstance(target.event(), Verified)
    assert target.block(0, 0) == payload


def test_a_payload_that_never_comes_ends_the_link_at_both_ends(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", 0.2)
    target, _receiver, ticket, _link, replies, _data = announced(rig)
    failed = target.event()
    assert isinstance(failed, Failed)
    assert failed.transfer == ticket.transfer
    assert "the payload did not come" in failed.reason
    with pytest.raises(LinkClosedError, match="the payload did not come"):
        next(replies)


def test_a_sender_killed_after_its_header_is_known_at_once(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PAYLOAD_TIMEOUT_S", NEVER_S)
    target, receiver, _ticket, link, _replies, _data = announced(rig)
    link.close()  # what the kernel does for a process that was killed
    assert isinstance(target.event(), Failed)
    receiver.close()


class Cut(Transfer):
    """A payload of which a part has come, as gloo treats it: no abort wakes its wait."""

    def __init__(self, real: Transfer) -> None:
        self._real, self.until, self.is_waited_for = real, threading.Event(), threading.Event()

    def wait(self) -> None:
        self.is_waited_for.set()
        assert self.until.wait(60)
        self._real.wait()


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_a_payload_cut_in_the_middle_delays_nobody(rig: Any, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Cut] = []
    usual = GlooCommunicator.receive

    def receive(self: GlooCommunicator, offset: int, size: int) -> Transfer:
        cuts.append(Cut(usual(self, offset, size)))
        return cuts[-1]

    monkeypatch.setattr(GlooCommunicator, "receive", receive)
    target, receiver, ticket, link, _replies, data = announced(rig)
    leaving = link._communicator.send(link._reserved, data.payload_bytes)
    leaving.wait()
    wait_for(lambda: bool(cuts))
    assert cuts[0].is_waited_for.wait(rig.patience_s)
    if by == "sender":
        link.close()
        assert isinstance(target.event(), Failed)
    receiver.close()
    receiver.cancel(ticket.transfer)
    threads = [thread for thread in threading.enumerate() if thread.name == "kv-gloo-place"]
    cuts[0].until.set()  # all of it comes now: too late
    for thread in threads:
        thread.join()
    assert not any(target.memory[G0])


@pytest.fixture
def options(rig: Any) -> dict[str, Any]:
    return {"spec": asdict(rig.DENSE), "num_blocks": BLOCKS}


def test_a_stopped_receiver_keeps_nobody_from_cancelling_and_closing(rig: Any, options: dict[str, Any]) -> None:
    peer = rig.peer("receiver", hangs=True, seed=0, **options)
    source = rig.side(num_blocks=BLOCKS, seed=9)
    sender = rig.sender(source)
    ticket = rig.ticket(peer.endpoints(), {0: range(BLOCKS)})
    peer.command("expect", ticket=as_json(ticket))
    assert peer.read()["event"] == "expected"
    sender.open(ticket)
    sender.push(ticket.transfer, G0, ids(range(BLOCKS)), ids(range(BLOCKS)), range(4))
    assert peer.read()["event"] == "writing"
    os.kill(peer.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: sender.links()[0].stalls > 0)  # everything that the window allows is under way
        sender.cancel(ticket.transfer)
        assert source.event() == Quiesced(transfer=ticket.transfer)
        waiting = rig.ticket(peer.endpoints(), {0: [1]})
        sender.open(waiting)
        sender.close()
        assert isinstance(source.event(), SendFailed)
    finally:
        peer.process.kill()


def test_a_stopped_sender_keeps_nobody_from_cancelling_and_closing(rig: Any, options: dict[str, Any]) -> None:
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", seed=6, **options)
    ticket = rig.ticket(receiver.endpoints(), {0: range(BLOCKS)})
    receiver.expect(ticket)
    target.pools[G0].write_gate.clear()
    peer.command("push", ticket=as_json(ticket))
    assert target.pools[G0].writing.wait(rig.patience_s)
    os.kill(peer.process.pid, signal.SIGSTOP)
    try:
        target.pools[G0].write_gate.set()
        receiver.cancel(ticket.transfer)
        image = target.image()
        receiver.close()
        assert target.image() == image
    finally:
        peer.process.kill()


def test_a_stop_that_ends_in_time_costs_nothing(rig: Any, options: dict[str, Any]) -> None:
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", seed=6, **options)
    ticket = rig.ticket(receiver.endpoints(), {0: range(BLOCKS)})
    receiver.expect(ticket)
    peer.command("push", ticket=as_json(ticket))
    assert target.pools[G0].writing.wait(rig.patience_s)
    os.kill(peer.process.pid, signal.SIGSTOP)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert isinstance(target.event(), Verified)
    assert peer.read()["event"] == "SendCompleted"


def test_links_come_and_go_without_a_trace(rig: Any) -> None:
    process = psutil.Process(os.getpid())
    target, source = rig.side(), rig.side(seed=1)
    receiver = rig.receiver(target)
    usage: list[tuple[int, int]] = []
    for number in range(120):
        sender = rig.sender(source)
        ticket = rig.ticket(receiver.endpoints(), {0: [1]})
        receiver.expect(ticket)
        sender.open(ticket)
        if number % 3:
            rig.push_all(sender, ticket, [2], [1])
            assert isinstance(source.event(), SendCompleted)
            assert isinstance(target.event(), Verified)
            sender.close()
        else:
            sender.close()
            assert isinstance(source.event(), SendFailed)
            receiver.cancel(ticket.transfer)
        wait_for(lambda: not receiver._listeners[0]._port._acceptor._connections)
        while not target.events.empty():  # a transfer with a closed sender fails, if it was announced
            assert isinstance(target.event(), Failed)
        usage.append((process.num_fds(), process.num_threads()))
    early = usage[10]
    wait_for(lambda: process.num_fds() <= early[0] and process.num_threads() <= early[1])
