"""Where transports end to the byte and to the frame: replies, shared memory, frames under way, cores."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.ids import Attempt, BlockId, GroupId, Incarnation, Rank, TransferId, WorkerId
from tandem.core.kv_compatibility import Codec
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import (
    MAX_REASON_BYTES,
    Checksum,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    encode,
    encode_reply,
)
from tandem.kvtransfer.transports import tcp
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.collective import MAX_FRAMES
from tandem.kvtransfer.transports.collective_listener import _Connection
from tandem.kvtransfer.transports.sealed_memfd import check_sealed, make_sealed
from tandem.kvtransfer.transports.shm import ShmLink

FINISH = Frame(
    kind=FrameKind.FINISH, transfer=TransferId(1), attempt=Attempt(1), source_incarnation=Incarnation(1),
    dest_incarnation=Incarnation(1), source_rank=Rank(0), source_ranks=1, dest_rank=Rank(0), group=GroupId(0),
    layers=range(0), heads=range(0), blocks=(BlockId(1),), payload_bytes=0, payload_crc=0, send_ns=0, codec=Codec.NONE,
    checksum=Checksum.CRC32,
)  # fmt: skip


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
        with pytest.raises(OSError, match=f"shared memory of 4096 bytes where {size} belong"):
            check_sealed(descriptor, size)
        with pytest.raises(OSError, match="where 1000 belong"):
            check_sealed(descriptor, 1000)
    finally:
        os.close(descriptor)


def test_so_many_frames_may_be_under_way_over_gloo_and_no_more() -> None:
    nothing: Any = SimpleNamespace(staging=memoryview(bytearray(64)))
    connection = _Connection("gloo", nothing, nothing, nothing, nothing)
    for _ in range(MAX_FRAMES):
        connection._announced(encode(FINISH))
    with pytest.raises(MalformedFrameError, match=f"more than {MAX_FRAMES} frames under way"):
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
