"""The cluster secret guards the worker's gRPC port; hellos of another incarnation or protocol are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.core.secret import METADATA_KEY, ClusterSecret
from tandem.router.workers import wire as router_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.auth import call_metadata
from tandem.workerhost.peers import PeerChannels
from tests.integration.workerhost.service import SECRET, Backend, for_peer, serving


async def code_of(address: str, metadata: Any, *messages: w.RouterMessage) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Stream(metadata=metadata)
        for message in messages:
            await call.write(message)
        try:
            await asyncio.wait_for(call.read(), 60)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((), grpc.StatusCode.UNAUTHENTICATED),
        (((METADATA_KEY, "wrong"),), grpc.StatusCode.UNAUTHENTICATED),
        (call_metadata(ClusterSecret(b"another secret of 32 bytes ......")), grpc.StatusCode.UNAUTHENTICATED),
        (call_metadata(SECRET), grpc.StatusCode.OK),
    ],
)
def test_only_members_get_in(metadata: Any, expected: grpc.StatusCode) -> None:
    async def run() -> grpc.StatusCode:
        async with serving(Backend()) as (_, address):
            hello = router_wire.hello("r", 1, 77)
            if expected is grpc.StatusCode.UNAUTHENTICATED:
                return await code_of(address, metadata)
            return await code_of(address, metadata, hello)

    assert asyncio.run(run()) is expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (router_wire.hello("r", 1, 1), grpc.StatusCode.FAILED_PRECONDITION),
        (router_wire.hello("r", 1, 0), grpc.StatusCode.FAILED_PRECONDITION),
        (router_wire.hello("", 1, 77), grpc.StatusCode.INVALID_ARGUMENT),
        (w.RouterMessage(hello=w.RouterHello(router="old")), grpc.StatusCode.FAILED_PRECONDITION),
        (w.RouterMessage(ping=w.Ping()), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_hello_is_checked(message: w.RouterMessage, expected: grpc.StatusCode) -> None:
    async def run() -> grpc.StatusCode:
        async with serving(Backend()) as (_, address):
            return await code_of(address, call_metadata(SECRET), message)

    assert asyncio.run(run()) is expected


def test_a_router_that_leaves_is_reported() -> None:
    async def run() -> Backend:
        backend = Backend()
        async with serving(backend) as (_, address):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = worker_pb2_grpc.WorkerStub(channel)
                call = stub.Stream(metadata=call_metadata(SECRET))
                await call.write(router_wire.hello("r7", 1, 77))
                await call.write(w.RouterMessage(ping=w.Ping(sequence=1)))
                kinds = [(await asyncio.wait_for(call.read(), 60)).WhichOneof("kind") for _ in range(3)]
                assert kinds == ["hello", "load", "pong"]
            gone = await asyncio.wait_for(backend.got.get(), 60)
            assert gone.router_gone.router == "r7"
        return backend

    assert asyncio.run(run()).acknowledgements == 1


def test_peers_talk_both_ways_and_hear_of_the_end() -> None:
    async def run() -> None:
        receiver, sender = Backend("d0", 77), Backend("p0", 5)
        async with serving(receiver) as (service, address), asyncio.TaskGroup() as tasks:
            channels = PeerChannels(sender, SECRET, tasks)
            ask = w.PeerMessage(ticket_request=w.TicketRequest(request="r", attempt=1))
            assert channels.send(for_peer(ask, address))
            heard = await asyncio.wait_for(receiver.got.get(), 60)
            assert (heard.peer.worker, heard.peer.message) == ("p0", ask)
            answer = w.PeerMessage(ticket=w.Ticket(request="r", attempt=1))
            assert service.answer_peer("p0", answer.SerializeToString())
            back = await asyncio.wait_for(sender.got.get(), 60)
            assert (back.peer.worker, back.peer.message) == ("d0", answer)
            channels.close()
            for backend, other in ((receiver, "p0"), (sender, "d0")):
                gone = await asyncio.wait_for(backend.got.get(), 60)
                assert gone.peer_gone.worker == other

    asyncio.run(run())


@pytest.mark.parametrize("incarnation", [78, 0])
def test_a_peer_of_another_incarnation_is_refused(incarnation: int) -> None:
    async def run() -> str:
        sender = Backend("p0", 5)
        async with serving(Backend("d0", 77)) as (_, address), asyncio.TaskGroup() as tasks:
            channels = PeerChannels(sender, SECRET, tasks)
            ping = w.PeerMessage(ping=w.Ping())
            channels.send(for_peer(ping, address, incarnation))
            gone = await asyncio.wait_for(sender.got.get(), 60)
        return gone.peer_gone.reason

    assert "FAILED_PRECONDITION" in asyncio.run(run())


def test_unreachable_peer_is_reported(unused_port: Callable[[], int]) -> None:
    async def run() -> str:
        sender = Backend("p0", 5)
        async with asyncio.TaskGroup() as tasks:
            channels = PeerChannels(sender, SECRET, tasks)
            address = f"127.0.0.1:{unused_port()}"
            channels.send(for_peer(w.PeerMessage(), address, 1))
            gone = await asyncio.wait_for(sender.got.get(), 60)
        return gone.peer_gone.reason

    assert "UNAVAILABLE" in asyncio.run(run())
