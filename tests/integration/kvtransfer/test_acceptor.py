"""A listener outlives a time in which its process has no descriptors or threads left."""

import contextlib
import logging
import os
import resource
import select
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import Failed, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.transports import acceptor as acceptor_module
from tandem.kvtransfer.transports.acceptor import Acceptor
from tandem.kvtransfer.transports.base import LinkClosedError
from tests.integration.kvtransfer.rig import Rig
from tools.waiting import wait_for


def test_connections_are_taken_again_once_there_are_descriptors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(tmp_path / "sock"))

    def serve(connection: socket.socket, _admit: Callable[[], None]) -> None:
        connection.send(b"welcome")

    def failures() -> list[Any]:
        return [record for record in caplog.records if record.message.startswith("transfer_accept_failed")]

    def failed_or_readable(client: socket.socket) -> bool:
        readable = select.poll()
        readable.register(client, select.POLLIN)
        return bool(failures() or readable.poll(0))

    acceptor = Acceptor(listening, serve, transport="test", limit=4)
    acceptor.start()
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(8)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 1, usual[1]))
        try:
            for client in clients:  # what another thread closes meanwhile lets one in
                client.settimeout(30)
                take_all_descriptors(held)
                client.connect(str(tmp_path / "sock"))
                wait_for(partial(failed_or_readable, client))
                if failures():
                    break
            assert failures()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
            for one in held:
                os.close(one)
        assert client.recv(100) == b"welcome"
    acceptor.close()


def take_all_descriptors(held: list[int]) -> None:
    """Take those that are free below the limit."""
    with suppress(OSError):
        while True:
            held.append(os.dup(0))


def test_strangers_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of too many has to go, known or not; accepted ones stay, up to the limit."""
    monkeypatch.setattr(acceptor_module, "MAX_STRANGERS", 3)
    path = str(tmp_path / "sock")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)

    def serve(connection: socket.socket, admit: Callable[[], None]) -> None:
        while (said := connection.recv(10)) not in (b"", b"bye"):
            if said == b"secret":
                admit()
            connection.send(b"hear, hear")

    def connect() -> socket.socket:
        client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        client.settimeout(30)
        client.connect(path)
        return client

    def answer(client: socket.socket, said: bytes) -> bytes:
        client.send(said)
        return client.recv(100)

    acceptor = Acceptor(listening, serve, transport="test", limit=2)
    acceptor.start()
    with contextlib.ExitStack() as stack:
        stack.callback(acceptor.close)
        friends = [connect() for _ in range(2)]
        assert [answer(friend, b"secret") for friend in friends] == [b"hear, hear"] * 2
        strangers = [connect() for _ in range(3)]
        assert [answer(stranger, b"hello") for stranger in strangers] == [b"hear, hear"] * 3
        newest = connect()
        assert answer(newest, b"hello") == b"hear, hear"
        assert strangers[0].recv(100) == b""
        assert [answer(client, b"still") for client in (*friends, *strangers[1:])] == [b"hear, hear"] * 4
        assert answer(newest, b"secret") == b""  # there are as many links as there may be
        assert answer(friends[0], b"bye") == b""
        assert answer(strangers[1], b"secret") == b"hear, hear"


def test_there_are_never_more_threads_than_links_and_twice_the_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger that has to go counts until its thread has noticed; a further one over the limit is turned away."""
    monkeypatch.setattr(acceptor_module, "MAX_STRANGERS", 3)
    path, limit, served, release = str(tmp_path / "sock"), 2, threading.Semaphore(0), threading.Event()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)

    def serve(connection: socket.socket, admit: Callable[[], None]) -> None:
        if connection.recv(10) == b"secret":
            admit()
            connection.send(b"welcome")
        served.release()
        release.wait()

    def connect() -> socket.socket:
        client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        client.settimeout(30)
        client.connect(path)
        return client

    acceptor = Acceptor(listening, serve, transport="test", limit=limit)
    acceptor.start()
    with contextlib.ExitStack() as stack:
        stack.callback(acceptor.close)
        stack.callback(release.set)
        for _ in range(limit):
            friend = connect()
            friend.send(b"secret")
            assert friend.recv(100) == b"welcome"
        for _ in range(2 * 3):
            connect().send(b"hello")
        for _ in range(limit + 2 * 3):
            assert served.acquire(timeout=30), "each has its thread"
        assert connect().recv(100) == b"", "turned away"


def test_a_receiver_that_cannot_start_leaves_nothing_listening(tmp_path: Path) -> None:
    rig = Rig("shm", tmp_path)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="assign"):
        rig.receiver(rig.side(), transports=("shm", "tcp"), bind_host="203.0.113.1")
    assert list(tmp_path.iterdir()) == []
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)


@pytest.mark.parametrize(("transport", "name"), [("gloo", "kv-gloo-place"), ("grpc", "kv-grpc-fetch")])
def test_a_link_without_a_thread_to_be_had_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, name: str
) -> None:
    usual = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        usual(thread)

    rig = Rig(transport, tmp_path)
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    blocks = tuple(map(BlockId, range(8)))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        ticket = rig.ticket(receiver.endpoints())
        receiver.expect(ticket)
        sender.open(ticket)
        assert isinstance(target.event(), Failed)
        assert isinstance(source.event(), SendFailed)
    ticket = rig.ticket(receiver.endpoints())
    receiver.expect(ticket)
    sender.open(ticket)
    sender.push(ticket.transfer, GroupId(0), blocks, blocks, range(4))
    sender.finish(ticket.transfer)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    rig.close()  # with nothing that was never begun


def test_closing_a_receiver_closes_every_listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("shm", tmp_path)
    receiver = rig.receiver(rig.side(), transports=("tcp", "shm", "grpc"))
    _tcp, shm, _grpc = receiver._listeners
    close = shm.close

    def broken() -> None:
        close()
        raise RuntimeError("broken")

    monkeypatch.setattr(shm, "close", broken)
    with pytest.raises(RuntimeError, match="broken"):
        receiver.close()
    monkeypatch.setattr(shm, "close", close)
    for endpoint in receiver.endpoints():
        with pytest.raises(LinkClosedError):
            rig.dial(endpoint)
    rig.close()
