"""Test edges of the transports: dialling, idle links and the end of gloo."""

import os
import queue
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.clock import ManualClock
from tandem.core.ids import BlockId, Incarnation, Rank, WorkerId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_REASON_BYTES,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    encode,
    encode_reply,
)
from tandem.kvtransfer.host_id import host_id, shares_clock
from tandem.kvtransfer.peer_link import IDLE_S, REST_S, LinkKey, PeerLink
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports import gloo_communicator, tcp
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.collective import MAX_FRAMES
from tandem.kvtransfer.transports.collective_listener import _Connection
from tandem.kvtransfer.transports.dialer import candidates
from tandem.kvtransfer.transports.gloo_communicator import _Calls, _GlooTransfer
from tandem.kvtransfer.transports.registry import Preference
from tandem.kvtransfer.transports.sealed_memfd import check_sealed, make_sealed
from tandem.kvtransfer.transports.shm import ShmLink
from tests.unit.kvtransfer.conftest import control

FINISH = control(kind=FrameKind.FINISH, blocks=(BlockId(1),))


def test_the_longest_reply_arrives_whole_over_shm() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ring: Any = SimpleNamespace(size=1 << 20, free=lambda consumed: None)
    with here, there:
        there.send(encode_reply(FrameReply(kind=ReplyKind.FAIL, reason="x" * (2 * MAX_REASON_BYTES))))
        assert next(iter(ShmLink(here, ring).replies())).reason == "x" * MAX_REASON_BYTES


@pytest.mark.parametrize("size", [4095, 4097, 8192])
def test_shared_memory_of_another_size_is_refused(size: int) -> None:
    descriptor = make_sealed("test", 4096)
    try:
        check_sealed(descriptor, 4096)
        with pytest.raises(OSError, match=f"shared memory of 4096 bytes, expected {size}"):
            check_sealed(descriptor, size)
        with pytest.raises(OSError, match="expected 1000"):
            check_sealed(descriptor, 1000)
    finally:
        os.close(descriptor)


def test_so_many_frames_may_be_under_way_over_gloo_and_no_more() -> None:
    nothing: Any = SimpleNamespace(staging=memoryview(bytearray(64)))
    connection = _Connection("gloo", nothing, nothing, nothing, nothing)
    for _ in range(MAX_FRAMES):
        connection._announced(encode(FINISH))
    with pytest.raises(MalformedFrameError, match=f"more than {MAX_FRAMES} frames in flight"):
        connection._announced(encode(FINISH))


def test_tcp_takes_as_many_sockets_as_the_cores_here_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    peer = Peer(worker=WorkerId("p"), incarnation=Incarnation(1), rank=Rank(0), host="h")

    def sockets_for(cores: int) -> int:
        asked.append(cores)
        return 1

    def dial(*about: Any) -> Any:
        raise OSError("nobody listens")

    monkeypatch.setattr(tcp, "sockets_for", sockets_for)
    monkeypatch.setattr(tcp, "dial", dial)
    for cores, expected in ((16, 16), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda found=cores: found)
        with pytest.raises(LinkClosedError, match="nobody listens"):
            tcp.TcpLink.dial("127.0.0.1:1", peer, ClusterSecret(b"s" * 32))
        assert asked.pop() == expected


GRPC = Endpoint(rank=Rank(0), transport="grpc", host="a:1", address="127.0.0.1:1")
SHM = Endpoint(rank=Rank(0), transport="shm", host="a:1", address="/run/kv.sock")


@pytest.mark.parametrize(
    ("preference", "host", "expected"),
    [
        ("auto", "a:1", [("shm", "same host"), ("grpc", "same host")]),
        ("auto", "a:2", [("grpc", "another host")]),
        ("auto", "b:1", [("grpc", "another host")]),
        ("shm", "a:2", [("shm", "configured")]),
        ("grpc", "a:1", [("grpc", "configured")]),
    ],
)
def test_candidates(preference: Preference, host: str, expected: list[tuple[str, str]]) -> None:
    found = candidates((GRPC, SHM), host, preference)
    assert [(c.endpoint.transport, c.reason) for c in found] == expected


def test_one_machine_has_one_id_and_one_clock() -> None:
    assert host_id() == host_id()
    assert shares_clock(host_id(), host_id().partition(":")[0] + ":another container")
    assert not shares_clock(host_id(), "another boot:x")


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


class Work:
    """Notes at its end whether the exit would have waited."""

    def __init__(self, calls: _Calls, ends: list[bool]) -> None:
        self._calls, self._ends = calls, ends

    def wait(self, timeout: Any) -> None: ...

    def __del__(self) -> None:
        self._ends.append(self._calls._count > 0)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    left: list[Any] = []
    monkeypatch.setattr(gloo_communicator, "_LEFT", left)
    return left


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_while_the_process_runs_it_is_freed_inside_a_call(left: list[Any], is_waited_for: bool) -> None:
    calls, ends = _Calls(), list[bool]()
    transfer = _GlooTransfer(Work(calls, ends), calls)
    if is_waited_for:
        transfer.wait()
    del transfer
    assert (ends, left) == ([True], [])


def test_while_the_process_ends_it_stays(left: list[Any]) -> None:
    calls, ends = _Calls(), list[bool]()
    transfer = _GlooTransfer(Work(calls, ends), calls)
    calls.refuse()
    with pytest.raises(LinkClosedError, match="the process ends"):
        transfer.wait()
    del transfer
    assert (ends, len(left)) == ([], 1)
