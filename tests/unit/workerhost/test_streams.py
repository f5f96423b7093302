"""Test streams of a worker: the relay, queues and prompts."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidRequestError
from tandem.core.ids import RouterId
from tandem.core.version import STREAM_VERSION
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import passing_pb2 as p
from tandem.rpc.v1 import worker_pb2 as w
from tandem.workercore.inbox import Inbox
from tandem.workercore.message_ring import RingHandle, RingReader, RingWriter
from tandem.workercore.outbox import Outbox
from tandem.workercore.proto_convert import prompt_from_wire
from tandem.workerhost import relay, stream_protocol
from tandem.workerhost.relay import from_peer, from_router, heard_from_router, joined
from tandem.workerhost.server import WorkerService
from tandem.workerhost.stream_protocol import CLOSED, OutQueue, run_stream


class Wire:
    """Both ends of a stream, in memory."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[str] = asyncio.Queue()
        self.written: list[bytes] = []

    def __aiter__(self) -> Wire:
        return self

    async def __anext__(self) -> str:
        return await self.incoming.get()

    async def write(self, message: bytes) -> None:
        self.written.append(message)


async def closed_as_a_message_comes(turns: int) -> tuple[str, list[Any]]:
    wire, queue = Wire(), OutQueue()
    heard: list[Any] = []
    stream = asyncio.create_task(run_stream(wire, heard.append, queue, wire))
    queue.put(b"said")
    while not wire.written:
        await asyncio.sleep(0)
    queue.close()
    for _ in range(turns):
        await asyncio.sleep(0)
    wire.incoming.put_nowait("ping")
    async with asyncio.timeout(2):  # less than it takes to call the other end silent
        return await stream, heard


def test_a_closed_stream_ends_whatever_comes() -> None:
    for turns in range(8):
        why, heard = asyncio.run(closed_as_a_message_comes(turns))
        assert why == CLOSED
        assert heard in ([], ["ping"])


def phase(request: str) -> bytes:
    return w.WorkerMessage(phase=w.RequestPhase(request=request, attempt=1, phase="queued")).SerializeToString()


def tokens(request: str) -> bytes:
    chunk = w.TokenChunk(request=request, attempt=1, tokens=[7])
    return w.WorkerMessage(tokens=w.StepTokens(chunks=[chunk])).SerializeToString()


def parts(message: bytes) -> list[bytes]:
    """Return the parts of a batch, as its reader finds them."""
    said = w.WorkerMessage.FromString(message).batch.messages
    return [one.SerializeToString() for one in said]


async def test_what_may_wait_goes_with_what_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_protocol, "PATIENCE_S", 3600.0)
    queue = OutQueue()
    taking = asyncio.ensure_future(queue.take())
    assert queue.put(b"patient", may_wait=True)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not taking.done()
    assert queue.put(b"urgent")
    assert queue.put(b"also patient", may_wait=True)
    assert await taking == [b"patient", b"urgent", b"also patient"]


async def test_what_may_wait_does_not_wait_for_ever() -> None:
    queue = OutQueue()
    for text in (b"one", b"two"):
        queue.put(text, may_wait=True)
        async with asyncio.timeout(10):
            assert await queue.take() == [text]


async def test_a_closed_queue_gives_what_it_has_and_then_nothing() -> None:
    queue = OutQueue()
    queue.put(b"last", may_wait=True)
    queue.close()
    assert not queue.put(b"too late")
    assert await queue.take() == [b"last"]
    assert await queue.take() == []
    assert await queue.take() == []


async def test_a_full_queue_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_protocol, "MAX_QUEUED", 2)
    queue = OutQueue()
    assert [queue.put(bytes(number)) for number in range(4)] == [True, True, False, False]
    assert await queue.take() == [b"", b"\0"]
    assert await queue.take() == []


async def test_a_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have up to 4 MiB: their number alone is no bound."""
    monkeypatch.setattr(stream_protocol, "MAX_QUEUED_BYTES", 10)
    queue = OutQueue()
    for _ in range(3):  # what was taken does not count
        assert queue.put(bytes(6))
        assert queue.put(bytes(6))
        assert await queue.take() == [bytes(6), bytes(6)]
    assert [queue.put(bytes(6)) for _ in range(4)] == [True, True, False, False]
    assert await queue.take() == [bytes(6), bytes(6)]
    assert await queue.take() == []


def test_one_message_is_sent_as_it_is() -> None:
    assert list(joined([tokens("a")])) == [tokens("a")]
    assert list(joined([])) == []


def test_several_messages_become_one_in_order() -> None:
    said = [phase("a"), tokens("a"), phase("b")]
    (batch,) = joined(said)
    assert parts(batch) == said


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [tokens("x" * 100) for _ in range(5)]
    monkeypatch.setattr(relay, "BATCH_BYTES", len(said[0]))
    sent = list(joined(said))
    assert [len(parts(message)) for message in sent] == [2, 2, 0]
    assert [one for message in sent for one in (parts(message) or [message])] == said


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


async def test_a_hosts_stream_neither_reads_nor_writes_what_a_rank_says_nor_writes_what_a_router_says() -> None:
    said = w.RouterMessage(cancel=w.Cancel(reason="why")).SerializeToString() + (
        w.RouterMessage(cancel=w.Cancel(request="r", attempt=2)).SerializeToString()
    )
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
    answer, load, told = call.written
    assert w.WorkerMessage.FromString(answer).hello.info.worker == "d0"
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


def test_a_prompt_is_read_in_either_form() -> None:
    ids = (3, 0, 4095, 2**32 - 1)
    assert prompt_from_wire(w.Submit(prompt=ids)) == ids
    assert prompt_from_wire(w.Submit(prompt_ids=array("I", ids).tobytes())) == ids
    assert prompt_from_wire(w.Submit(prompt_ids=b"\x03\x00\x00\x00\x00\x01\x00\x00")) == (3, 256)
    assert prompt_from_wire(w.Submit()) == ()


def test_half_an_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="7 bytes"):
        prompt_from_wire(w.Submit(prompt_ids=b"1234567"))
