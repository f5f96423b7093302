"""The cluster secret guards the worker's gRPC port; hellos of another incarnation or protocol are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.core.call_proof import ANSWER_KEY, PEER, PROOF_KEY
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.router.workers import proto_convert as router_wire
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.auth import MAX_CHECKS, SecretInterceptor
from tandem.workerhost.peer_channels import PeerChannels
from tandem.workerhost.relay import SERVICE
from tests.integration.workerhost.service import SECRET, Backend, for_peer, proof, serving

OTHER = ClusterSecret(b"another secret of 32 bytes ......")


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
        (lambda: (), grpc.StatusCode.UNAUTHENTICATED),
        (lambda: ((PROOF_KEY, "wrong"),), grpc.StatusCode.UNAUTHENTICATED),
        (lambda: ((PROOF_KEY, "d0/77 1 2 3"),), grpc.StatusCode.UNAUTHENTICATED),
        (lambda: proof(secret=OTHER), grpc.StatusCode.UNAUTHENTICATED),
        (lambda: proof(PEER), grpc.StatusCode.UNAUTHENTICATED),
        (lambda: proof(target="d1/77"), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda: proof(target="d0/76"), grpc.StatusCode.FAILED_PRECONDITION),
        (proof, grpc.StatusCode.OK),
    ],
)
def test_only_members_that_mean_this_worker_get_in(metadata: Any, expected: grpc.StatusCode) -> None:
    async def run() -> grpc.StatusCode:
        async with serving(Backend()) as (_, address):
            hello = router_wire.hello("r", 1, 77)
            return await code_of(address, metadata(), *([hello] if expected is grpc.StatusCode.OK else []))

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
            return await code_of(address, proof(), message)

    assert asyncio.run(run()) is expected


def test_a_recorded_call_is_refused_also_at_once() -> None:
    async def run() -> list[grpc.StatusCode]:
        async with serving(Backend()) as (_, address):
            recorded, hello = proof(), router_wire.hello("r", 1, 77)
            return [await code_of(address, recorded, hello), await code_of(address, recorded)]

    assert asyncio.run(run()) == [grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION]


def test_a_worker_that_does_not_know_the_secret_hears_nothing_of_a_peer() -> None:
    heard: list[bytes] = []

    async def run() -> str:
        async def deaf(requests: Any, context: Any) -> None:
            await context.send_initial_metadata(((ANSWER_KEY, "0" * 64),))
            async for message in requests:
                heard.append(message)

        server = grpc.aio.server(options=PROOF_OF_LIFE)
        peer = grpc.stream_stream_rpc_method_handler(deaf)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Peer": peer}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        sender = Backend("p0", 5)
        try:
            async with asyncio.TaskGroup() as tasks:
                channels = PeerChannels(sender, SECRET, tasks)
                channels.send(for_peer(w.PeerMessage(ping=w.Ping()), f"127.0.0.1:{port}"))
                gone = await asyncio.wait_for(sender.got.get(), 60)
                channels.close()
        finally:
            await server.stop(0)
        return gone.peer_gone.reason

    assert "did not" in asyncio.run(run())
    assert heard == []


def test_health_checks_are_open_few_at_a_time_and_short() -> None:
    """A check without a request message is ended by a deadline, and there is room for the next."""

    async def run() -> None:
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
        await checks.set("live", health_pb2.HealthCheckResponse.SERVING)
        server = grpc.aio.server(interceptors=(SecretInterceptor(SECRET, lambda: Backend().info),))
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                ask = health_pb2.HealthCheckRequest(service="live")
                assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
                assert (await anext(aiter(stub.Watch(ask)))).status == health_pb2.HealthCheckResponse.SERVING
                dial: Any = channel.stream_unary("/grpc.health.v1.Health/Check", None, None)
                silent = [dial() for _ in range(MAX_CHECKS + 1)]
                codes = await asyncio.gather(*(call.code() for call in silent))
                assert sorted(code.name for code in codes) == ["DEADLINE_EXCEEDED"] * MAX_CHECKS + [
                    "RESOURCE_EXHAUSTED"
                ]
                assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        finally:
            await server.stop(0)

    asyncio.run(run())


def test_a_router_that_leaves_is_reported() -> None:
    async def run() -> Backend:
        backend = Backend()
        async with serving(backend) as (_, address):
            async with grpc.aio.insecure_channel(address) as channel:
                stub: Any = worker_pb2_grpc.WorkerStub(channel)
                call = stub.Stream(metadata=proof())
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
