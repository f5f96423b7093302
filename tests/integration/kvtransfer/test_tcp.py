"""Faults of raw sockets alone: strangers, dawdlers, IPv6, and the sockets of one link ending together."""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId, Rank, TransferId, WorkerId
from tandem.core.secret import NONCE_BYTES
from tandem.kvtransfer.events import Failed, SendCompleted, SendFailed
from tandem.kvtransfer.frame import FrameKind, encode
from tandem.kvtransfer.transports import tcp_listener, tcp_socket
from tandem.kvtransfer.transports.base import Peer
from tandem.kvtransfer.transports.tcp import MAGIC, PRELUDE, TcpLink, sockets_for
from tandem.kvtransfer.transports.tcp_socket import split_address
from tests.integration.kvtransfer.raw import Raw
from tests.integration.kvtransfer.rig import Rig
from tests.unit.kvtransfer.conftest import control
from tools.waiting import wait_for

G0 = GroupId(0)
BLOCKS = tuple(map(BlockId, range(8)))


@pytest.fixture
def tcp_rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig("tcp", tmp_path)
    yield made
    made.close()


def push(rig: Rig, sender: Any, receiver: Any, *, finish: bool = True) -> Any:
    ticket = rig.ticket(receiver.endpoints())
    receiver.expect(ticket)
    sender.open(ticket)
    sender.push(ticket.transfer, G0, BLOCKS if finish else BLOCKS[:4], BLOCKS if finish else BLOCKS[:4], range(4))
    if finish:
        sender.finish(ticket.transfer)
    return ticket


def test_ipv6(tcp_rig: Rig) -> None:
    source, target = tcp_rig.side(seed=1), tcp_rig.side()
    try:
        receiver = tcp_rig.receiver(target, bind_host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert receiver.endpoints()[0].address.startswith("[::1]:")
    push(tcp_rig, tcp_rig.sender(source), receiver)
    assert isinstance(source.event(), SendCompleted)


@pytest.mark.parametrize("words", [b"", b"\x01", b"\xff\xff" + bytes(100), b"\x50\x00" + b"x" * 80])
def test_a_stranger_is_shown_out_in_time(tcp_rig: Rig, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_socket, "DIAL_TIMEOUT_S", 0.2)
    source, target = tcp_rig.side(seed=1), tcp_rig.side()
    receiver, sender = tcp_rig.receiver(target), tcp_rig.sender(source)
    with socket.create_connection(split_address(receiver.endpoints()[0].address), tcp_rig.patience_s) as stranger:
        assert len(stranger.recv(100)) == 2 + NONCE_BYTES
        stranger.sendall(words)
        with contextlib.suppress(ConnectionResetError):  # it hung up before it had read all
            assert stranger.recv(100) == b""
    monkeypatch.undo()
    push(tcp_rig, sender, receiver)
    assert isinstance(source.event(), SendCompleted)


@pytest.mark.parametrize("number", range(2))
def test_a_link_that_loses_one_of_its_sockets_ends(tcp_rig: Rig, number: int) -> None:
    source, target = tcp_rig.side(seed=1), tcp_rig.side()
    receiver, sender = tcp_rig.receiver(target), tcp_rig.sender(source)
    push(tcp_rig, sender, receiver, finish=False)
    assert target.pools[G0].writing.wait(tcp_rig.patience_s)
    (peer_link,) = sender._links.values()
    link: Any = peer_link._link
    link._lanes[number].connection.shutdown(socket.SHUT_RDWR)
    assert isinstance(target.event(), Failed)
    assert isinstance(source.event(), SendFailed)


def test_nothing_is_taken_from_a_link_of_which_a_socket_was_lost(tcp_rig: Rig) -> None:
    """Data in the other socket would belong to a transfer that no code fails any more."""
    target = tcp_rig.side()
    receiver = tcp_rig.receiver(target)
    endpoint = receiver.endpoints()[0]
    peer = Peer(worker=WorkerId("p0"), incarnation=tcp_rig.SENDER, rank=Rank(0), host=endpoint.host)
    raw = Raw(TcpLink.dial(endpoint.address, peer, tcp_rig.secret), "tcp")
    first, second = tcp_rig.ticket([endpoint], {0: [1]}), tcp_rig.ticket([endpoint], {0: [2]})
    payload = bytes(tcp_rig.DENSE.block_bytes())
    frame = tcp_rig.block(first, payload)

    try:
        receiver.expect(first)
        target.pools[G0].write_gate.clear()
        raw.send(frame, payload)  # over the second socket
        assert target.pools[G0].writing.wait(tcp_rig.patience_s)
        probe = replace(frame, kind=FrameKind.PROBE, transfer=TransferId(0), group=GroupId(0), blocks=())
        raw.send(probe, payload)  # over the first
        raw.send(tcp_rig.block(second, payload), payload)  # behind the one that is being written
        link: Any = raw.link
        wait_for(lambda: receiver.counters()["probes"] == 1)
        link._lanes[0].connection.shutdown(socket.SHUT_RDWR)
        listener: Any = receiver._listeners[0]
        wait_for(lambda: not listener._links)
        receiver.expect(second)
        target.pools[G0].write_gate.set()
        ended = [target.event(), target.event()]
        assert {type(event) for event in ended[1:]} == {Failed}
        assert ended[1].transfer == second.transfer or ended[0].transfer == second.transfer
        assert target.block(0, 2) == bytes(len(payload))
    finally:
        target.pools[G0].write_gate.set()
        raw.link.close()
        raw.link.release()


@pytest.mark.parametrize("is_replying", [False, True])
def test_a_sender_that_reads_nothing_cannot_keep_a_link_that_is_closed_on_it(
    tcp_rig: Rig, fill: Any, is_replying: bool
) -> None:
    """The reason of its link's end cannot be sent to it, neither at once nor behind a reply that has no room."""
    listener: Any = tcp_rig.receiver(tcp_rig.side())._listeners[0]
    peer = Peer(worker=WorkerId("p0"), incarnation=tcp_rig.SENDER, rank=Rank(0), host="h")
    inbound = tcp_listener._Inbound(listener._intake, listener._intake.connect(peer), 2)
    pairs = [socket.socketpair() for _ in range(2)]  # no TCP, which would end it by itself after a while
    threads = []
    for number, (_, theirs) in enumerate(pairs):
        inbound.add(peer, number, 2, theirs)
        threads.append(threading.Thread(target=serve_until_it_breaks, args=(inbound, theirs), daemon=True))
    fill(pairs[0][1])
    if is_replying:
        probe = encode(control(kind=FrameKind.PROBE, transfer=TransferId(0)))
        threads[1].start()
        pairs[1][0].sendall(PRELUDE.pack(MAGIC, len(probe), len(probe) ^ 0xFFFFFFFF) + probe)
        wait_for(inbound._lock.locked)
    threads[0].start()
    pairs[0][0].sendall(bytes(PRELUDE.size))
    for thread in threads[: 1 + is_replying]:
        thread.join(tcp_rig.patience_s)
        assert not thread.is_alive()
    for connection in itertools.chain(*pairs):
        connection.close()


def serve_until_it_breaks(inbound: Any, connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        inbound.serve(connection)


@pytest.mark.parametrize(("cores", "sockets"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (192, 4)])
def test_more_cores_more_sockets(cores: int, sockets: int) -> None:
    assert sockets_for(cores) == sockets
