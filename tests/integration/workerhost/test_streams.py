"""Streams that are replaced, that do not drain, and messages that no ring can hold."""

import asyncio
import os
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tandem.core.call_proof import PEER
from tandem.core.errors import RequestTooLargeError
from tandem.core.kv_compatibility import PROTOCOL
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.router.workers import proto_convert as router_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workercore.message_ring import RingReader
from tandem.workerhost import peer_channels, rank_process, stream_protocol
from tandem.workerhost.peer_channels import PeerChannels
from tandem.workerhost.rank_process import RankProcess
from tandem.workerhost.relay import ForRank
from tandem.workerhost.server import WorkerService
from tests.integration.workerhost.service import SECRET, Backend, for_peer, proof, serving
from tools.made_up_worker import let_in
from tools.waiting import wait_for_async


def hello(router: str) -> w.RouterMessage:
    return router_wire.hello(router, 1, 77)


def submit(request: str) -> w.RouterMessage:
    return w.RouterMessage(submit=w.Submit(request=request, attempt=1))


async def open_stream(channel: Any, router: str) -> Any:
    call = worker_pb2_grpc.WorkerStub(channel).Stream(metadata=proof())
    await call.write(hello(router))
    assert (await asyncio.wait_for(call.read(), 60)).HasField("hello")
    return call


async def test_a_newer_stream_ends_the_requests_of_the_older() -> None:
    backend = Backend()
    async with serving(backend) as (_, address), grpc.aio.insecure_channel(address) as channel:
        older = await open_stream(channel, "r")
        await older.write(submit("a"))
        kinds = [(await asyncio.wait_for(backend.got.get(), 60)).WhichOneof("kind")]
        newer = await open_stream(channel, "r")
        await newer.write(submit("b"))
        kinds += [(await asyncio.wait_for(backend.got.get(), 60)).WhichOneof("kind") for _ in range(2)]
        newer.cancel()
        kinds.append((await asyncio.wait_for(backend.got.get(), 60)).WhichOneof("kind"))
    assert backend.got.empty()
    assert kinds == ["router", "router_gone", "router", "router_gone"]


async def test_a_peer_that_comes_back_has_lost_its_transfers() -> None:
    backend = Backend()
    async with serving(backend) as (_, address), grpc.aio.insecure_channel(address) as channel:
        calls = []
        for incarnation in (5, 6):
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            calls.append(stub.Peer(metadata=proof(PEER)))
            mine = w.PeerHello(worker="p0", incarnation=incarnation, peer_incarnation=77, protocol=PROTOCOL[0])
            await calls[-1].write(w.PeerMessage(hello=mine))
            assert (await asyncio.wait_for(calls[-1].read(), 60)).HasField("hello")
        gone = await asyncio.wait_for(backend.got.get(), 60)
        assert (gone.peer_gone.worker, gone.peer_gone.incarnation) == ("p0", 0)


def test_a_peer_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channels, "HELLO_TIMEOUT_S", 600.0)

    async def run() -> None:
        writers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        backend = Backend()
        async with asyncio.TaskGroup() as tasks:
            channels = PeerChannels(backend, SECRET, tasks)
            for incarnation in (1, 2):
                to = for_peer(w.PeerMessage(), address, incarnation)
                assert channels.send(to)
                if incarnation == 1:  # the other one is not even begun
                    await wait_for_async(lambda: writers)
            channels.close()
            assert not channels.send(to)
        assert {backend.got.get_nowait().peer_gone.incarnation for _ in range(2)} == {1, 2}
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        silent.close()
        await silent.wait_closed()

    asyncio.run(asyncio.wait_for(run(), 60))


async def test_who_reads_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pings still come, but what it should get fills every buffer on the way."""
    monkeypatch.setattr(stream_protocol, "IDLE_TIMEOUT_S", 0.5)
    backend = Backend()
    async with serving(backend) as (service, address), grpc.aio.insecure_channel(address) as channel:
        call = await open_stream(channel, "r")
        failed = w.RequestFailed(request="x", message="y" * 1_000_000)
        for _ in range(30):
            service.to_router("r", w.WorkerMessage(failed=failed).SerializeToString())

        async def is_gone() -> bool:
            await call.write(w.RouterMessage(ping=w.Ping(sequence=1)))
            await asyncio.sleep(0.1)  # between two pings
            return not backend.got.empty()

        await wait_for_async(is_gone)
        assert backend.got.get_nowait().router_gone.router == "r"
        call.cancel()


class Deaf(WorkerService):
    """A peer that sends hello and pings, and reads nothing."""

    async def Peer(self, requests: Any, context: Any) -> None:  # noqa: N802
        await let_in(context, SECRET, PEER)
        await anext(requests)
        mine = w.PeerHello(worker="d0", incarnation=77, peer_incarnation=5, protocol=PROTOCOL[0])
        await context.write(w.PeerMessage(hello=mine).SerializeToString())
        while True:
            await asyncio.sleep(0.05)
            await context.write(w.PeerMessage(ping=w.Ping()).SerializeToString())


async def test_a_peer_that_reads_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_protocol, "IDLE_TIMEOUT_S", 1.0)
    backend, deaf = Backend("p0", 5), grpc.aio.server(options=PROOF_OF_LIFE)
    Deaf(Backend()).add_to(deaf)
    address = f"127.0.0.1:{deaf.add_insecure_port('127.0.0.1:0')}"
    await deaf.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            channels = PeerChannels(backend, SECRET, tasks)
            failed = w.PeerMessage(failed=w.TransferFailed(request="x" * 1_000_000))
            to = for_peer(failed, address)
            for _ in range(30):
                assert channels.send(to)
            gone = (await asyncio.wait_for(backend.got.get(), 60)).peer_gone
            channels.close()
    finally:
        await deaf.stop(None)
    assert (gone.worker, gone.incarnation) == ("d0", 77)
    # Where the loop stands still, the peer's messages may be late, too.
    assert gone.reason in ("it read nothing for 1 s", "it sent nothing for 1 s")


async def test_nobody_is_dialled_once_the_channels_are_closed() -> None:
    """A rank's message while the worker stops opens no channel, which would then stay open."""
    far, near = Backend(), Backend("p0", 5)
    async with serving(far) as (_, address):
        failed = w.PeerMessage(failed=w.TransferFailed(request="x"))
        to = for_peer(failed, address)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            channels = PeerChannels(near, SECRET, tasks)
            for drop in (channels.drop_all, channels.close):
                assert channels.send(to)
                assert (await far.got.get()).WhichOneof("kind") == "peer"
                drop()
                assert (await near.got.get()).peer_gone.worker == "d0"
                assert (await far.got.get()).WhichOneof("kind") == "peer_gone"
            assert not channels.send(to)
        assert not channels.send(to)


async def test_what_a_peer_says_and_the_rank_cannot_take_ends_its_channel_alone() -> None:
    """Were it raised in the channel's task, it would end the whole worker."""

    class Full(Backend):
        def to_rank(self, message: ForRank) -> None:
            if message.HasField("peer"):
                raise BufferError("rank 0 does not read its messages")
            super().to_rank(message)

    backend = Full("p0", 5)
    async with serving(Backend()) as (service, address), asyncio.TaskGroup() as tasks:
        channels = PeerChannels(backend, SECRET, tasks)
        ticket = w.PeerMessage(ticket=w.Ticket(request="r"))
        to = for_peer(ticket, address)
        assert channels.send(to)
        await wait_for_async(lambda: service.answer_peer("p0", ticket.SerializeToString()))
        gone = (await asyncio.wait_for(backend.got.get(), 60)).peer_gone
        channels.close()
    assert (gone.worker, gone.incarnation, gone.reason) == ("d0", 77, "rank 0 does not read its messages")


async def test_a_submission_that_fits_no_ring_is_refused() -> None:
    class Small(Backend):
        def to_rank(self, message: ForRank) -> None:
            if message.ByteSize() > 1000:
                raise RequestTooLargeError("a message of so many bytes")
            super().to_rank(message)

    backend = Small()
    async with serving(backend) as (_, address), grpc.aio.insecure_channel(address) as channel:
        call = await open_stream(channel, "r")
        await call.read()  # the load
        await call.write(w.RouterMessage(submit=w.Submit(request="big", attempt=3, prompt=[1] * 2000)))
        failed = (await asyncio.wait_for(call.read(), 60)).failed
        assert (failed.request, failed.attempt, failed.code) == ("big", 3, "request_too_large")
        await call.write(submit("next"))
        assert (await asyncio.wait_for(backend.got.get(), 60)).router.message.submit.request == "next"


async def test_a_rank_that_takes_nothing_still_hears_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "MAX_BACKLOG", 3)
    rank = RankProcess(0, "nobody", Path(os.devnull), lambda _: None)
    big = e.HostToRank(router=e.FromRouter(router="r" * 3_000_000))
    for _ in range(5):  # two in the ring, three behind it
        rank.send(big)
    with pytest.raises(BufferError):
        rank.send(big)
    rank.send(e.HostToRank(router_gone=e.RouterGone(router="r")))
    with pytest.raises(RequestTooLargeError):
        rank.send(e.HostToRank(router=e.FromRouter(router="r" * 5_000_000)))
    rank.close()


async def test_what_waits_for_a_rank_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have up to 4 MiB: their number alone is no bound."""
    monkeypatch.setattr(rank_process, "MAX_BACKLOG_BYTES", 6_000_000)
    rank = RankProcess(0, "nobody", Path(os.devnull), lambda _: None)
    big = e.HostToRank(router=e.FromRouter(router="r" * 3_000_000))
    for _ in range(4):  # two in the ring, two behind it
        rank.send(big)
    with pytest.raises(BufferError):
        rank.send(big)
    reader = RingReader(rank._to_rank)
    assert len(reader.read_all()) == 2
    await wait_for_async(lambda: not rank._backlog)
    rank.send(big)
    rank.close()
    reader.close()
