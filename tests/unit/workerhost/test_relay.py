"""Messages that a host passes on: those of others under the same numbers, as the bytes that came."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tandem.core.clock import MonotonicClock
from tandem.core.ids import RouterId
from tandem.core.protocol_version import STREAM_VERSION
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.inbox import Inbox
from tandem.workercore.message_ring import RingHandle, RingReader, RingWriter
from tandem.workercore.outbox import Outbox
from tandem.workerhost.relay import from_peer, from_router, heard_from_router
from tandem.workerhost.server import WorkerService

PAIRS: list[tuple[Any, Any]] = [
    (p.FromRank, e.RankToHost),
    (p.PassedToRouter, e.ToRouter),
    (p.PassedToPeer, e.ToPeer),
    (p.PassedFromRouter, e.FromRouter),
    (p.PassedFromPeer, e.FromPeer),
    (p.PassedBatch, w.WorkerBatch),
]


def is_passed(mine: FieldDescriptor, theirs: FieldDescriptor) -> bool:
    """The same bytes on the wire: as they are, or a message within the message."""
    if mine.type == theirs.type:
        return True
    return mine.type == FieldDescriptor.TYPE_BYTES and theirs.type == FieldDescriptor.TYPE_MESSAGE


@pytest.mark.parametrize(("view", "whole"), PAIRS, ids=lambda kind: kind.DESCRIPTOR.name)
def test_the_host_has_every_field_where_it_is(view: Any, whole: Any) -> None:
    mine, theirs = view.DESCRIPTOR.fields_by_name, whole.DESCRIPTOR.fields_by_name
    assert list(mine) == list(theirs)
    for name, field in mine.items():
        assert field.number == theirs[name].number, name
        assert is_passed(field, theirs[name]), name


@pytest.mark.parametrize(("view", "whole"), [(p.ToRank, e.HostToRank), (p.PassedWorkerMessage, w.WorkerMessage)])
def test_what_it_has_of_the_others_is_where_it_is(view: Any, whole: Any) -> None:
    for name, field in view.DESCRIPTOR.fields_by_name.items():
        assert field.number == whole.DESCRIPTOR.fields_by_name[name].number, name
        assert is_passed(field, whole.DESCRIPTOR.fields_by_name[name])


BACKWARDS = w.WorkerMessage(phase=w.RequestPhase(phase="decode")).SerializeToString() + (
    w.WorkerMessage(phase=w.RequestPhase(request="r", attempt=2)).SerializeToString()
)
"""As no library would write it; a decode and a new encode put it in order."""


class Call:
    """A router's end of a stream: it sends hello and keeps the messages that it gets."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[bytes] = asyncio.Queue()
        self.written: list[bytes] = []

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        return heard_from_router(await self.incoming.get())

    async def write(self, message: bytes) -> None:
        self.written.append(message)


class Backend:
    def __init__(self) -> None:
        self.info = w.WorkerInfo(worker="d0", incarnation=7)
        self.got: list[Any] = []

    def to_rank(self, message: Any) -> None:
        self.got.append(message)

    def acknowledged(self) -> None:
        raise AssertionError("nobody pings")


def test_a_hosts_stream_neither_reads_nor_writes_what_a_rank_says_nor_writes_what_a_router_says() -> None:
    said = w.RouterMessage(cancel=w.Cancel(reason="why")).SerializeToString() + (
        w.RouterMessage(cancel=w.Cancel(request="r", attempt=2)).SerializeToString()
    )

    async def run() -> tuple[Call, Backend]:
        call, backend = Call(), Backend()
        service = WorkerService(backend)
        hello = w.RouterHello(router="r", worker_incarnation=7, protocol=STREAM_VERSION)
        call.incoming.put_nowait(w.RouterMessage(hello=hello).SerializeToString())
        call.incoming.put_nowait(said)
        stream = asyncio.create_task(service.Stream(call, call))
        while not backend.got:
            await asyncio.sleep(0)
        service.to_router("r", BACKWARDS)
        while len(call.written) < 3:
            await asyncio.sleep(0)
        service.close_all()
        await stream
        return call, backend

    call, backend = asyncio.run(run())
    hello, load, told = call.written
    assert w.WorkerMessage.FromString(hello).hello.info.worker == "d0"
    assert w.WorkerMessage.FromString(load).HasField("load")
    assert told == BACKWARDS
    assert backend.got[0].router.message == said
    assert e.HostToRank.FromString(backend.got[0].SerializeToString()).router.message.cancel.request == "r"


def test_rank_0_hears_what_is_passed_on_and_passes_over_what_cannot_be_read() -> None:
    handle = RingHandle.create("test-passing")
    inbox, writer = Inbox.open(RingReader(handle)), RingWriter(handle)
    ticket = w.PeerMessage(ticket=w.Ticket(request="r", attempt=3))
    for data in (
        from_router("a", b"\xff").SerializeToString(),
        from_router("a", w.RouterMessage(cancel=w.Cancel(request="x")).SerializeToString()).SerializeToString(),
        from_peer("p0", 5, ticket.SerializeToString()).SerializeToString(),
    ):
        writer.write(data, 1.0)
    heard: list[Any] = inbox.take(0.0)
    inbox.close()
    writer.close()
    handle.close()
    router, peer = heard
    assert router.router.message.cancel.request == "x"
    assert (peer.peer.worker, peer.peer.incarnation, peer.peer.message) == ("p0", 5, ticket)
    assert peer.peer.received_s > 0


def test_only_what_waits_may_wait() -> None:
    said: list[bytes] = []
    outbox = Outbox(said.append)
    outbox.to_router(RouterId("r"), w.WorkerMessage(phase=w.RequestPhase(request="x")))
    outbox.to_router(RouterId("r"), w.WorkerMessage(failed=w.RequestFailed(request="x")))
    assert [p.FromRank.FromString(data).router.may_wait for data in said] == [True, False]


def test_what_peers_say_is_stamped_by_the_clock_that_the_rank_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was suspended for an hour."""
    clocks = {time.CLOCK_MONOTONIC: 60.0, time.CLOCK_BOOTTIME: 3660.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert from_peer("p0", 5, b"").peer.received_s == MonotonicClock().now_s() == 3660.0
