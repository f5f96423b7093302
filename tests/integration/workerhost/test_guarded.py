"""Test the guarded port of a worker, protocol versions and a load that hangs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tandem.core.call_proof import ANSWER_KEY, PEER, PROOF_KEY
from tandem.core.config import WorkerConfig, WorkerSection
from tandem.core.errors import WorkerLostError
from tandem.core.kv_compatibility import PROTOCOL
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.core.secret import ClusterSecret
from tandem.core.state_enums import RoleName
from tandem.router.workers import proto_convert as router_wire
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost import host as hosting
from tandem.workerhost import rank_group
from tandem.workerhost.auth import MAX_CHECKS, MAX_WATCHES, SecretInterceptor
from tandem.workerhost.host import WorkerHost
from tandem.workerhost.peer_channels import PeerChannels
from tandem.workerhost.relay import SERVICE
from tests.integration.workerhost import hanging_rank
from tests.integration.workerhost.service import NOVELTY, SECRET, Backend, Stranger, for_peer, hello, proof, serving
from tools.running_cluster import is_alive

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
async def test_only_members_that_mean_this_worker_get_in(metadata: Any, expected: grpc.StatusCode) -> None:
    async with serving(Backend()) as (_, address):
        hello = router_wire.hello("r", 1, 77)
        assert (await code_of(address, metadata(), *([hello] if expected is grpc.StatusCode.OK else []))) is expected


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
async def test_hello_is_checked(message: w.RouterMessage, expected: grpc.StatusCode) -> None:
    async with serving(Backend()) as (_, address):
        assert (await code_of(address, proof(), message)) is expected


async def test_a_recorded_call_is_refused_also_at_once() -> None:
    async with serving(Backend()) as (_, address):
        recorded, hello = proof(), router_wire.hello("r", 1, 77)
        assert [await code_of(address, recorded, hello), await code_of(address, recorded)] == [
            grpc.StatusCode.OK,
            grpc.StatusCode.FAILED_PRECONDITION,
        ]


async def test_a_worker_that_does_not_know_the_secret_hears_nothing_of_a_peer() -> None:
    heard: list[bytes] = []

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
    assert "did not" in gone.peer_gone.reason
    assert heard == []


LIVE = health_pb2.HealthCheckRequest(service="live")


@asynccontextmanager
async def health_channel() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a worker's port that has a health service alone."""
    checks = health.aio.HealthServicer()  # type: ignore[attr-defined]
    await checks.set("live", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.aio.server(interceptors=(SecretInterceptor(SECRET, lambda: Backend().info),))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_health_checks_are_open_few_at_a_time_and_short() -> None:
    """A check without a request message is ended by a deadline, and there is room for the next."""
    async with health_channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(LIVE)).status == health_pb2.HealthCheckResponse.SERVING
        dial: Any = channel.stream_unary("/grpc.health.v1.Health/Check", None, None)
        silent = [dial() for _ in range(MAX_CHECKS + 1)]
        codes = await asyncio.gather(*(call.code() for call in silent))
        assert sorted(code.name for code in codes) == ["DEADLINE_EXCEEDED"] * MAX_CHECKS + ["RESOURCE_EXHAUSTED"]
        assert (await stub.Check(LIVE)).status == health_pb2.HealthCheckResponse.SERVING


async def test_health_is_watched_by_few_at_a_time() -> None:
    async with health_channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(LIVE) for _ in range(MAX_WATCHES)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(LIVE).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(LIVE)).status == health_pb2.HealthCheckResponse.SERVING
        watches[0].cancel()

        async def watched_again() -> bool:
            try:
                return bool((await stub.Watch(LIVE).read()).status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.aio.AioRpcError:
                return False

        async with asyncio.timeout(60):  # the worker hears of the cancelled one a little later
            while not await watched_again():
                pass


async def test_a_router_that_leaves_is_reported() -> None:
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
    assert backend.acknowledgements == 1


async def test_peers_talk_both_ways_and_hear_of_the_end() -> None:
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


@pytest.mark.parametrize("incarnation", [78, 0])
async def test_a_peer_of_another_incarnation_is_refused(incarnation: int) -> None:
    sender = Backend("p0", 5)
    async with serving(Backend("d0", 77)) as (_, address), asyncio.TaskGroup() as tasks:
        channels = PeerChannels(sender, SECRET, tasks)
        ping = w.PeerMessage(ping=w.Ping())
        channels.send(for_peer(ping, address, incarnation))
        gone = await asyncio.wait_for(sender.got.get(), 60)
    assert "FAILED_PRECONDITION" in gone.peer_gone.reason


async def test_unreachable_peer_is_reported(unused_port: Callable[[], int]) -> None:
    sender = Backend("p0", 5)
    async with asyncio.TaskGroup() as tasks:
        channels = PeerChannels(sender, SECRET, tasks)
        address = f"127.0.0.1:{unused_port()}"
        channels.send(for_peer(w.PeerMessage(), address, 1))
        gone = await asyncio.wait_for(sender.got.get(), 60)
    assert "UNAVAILABLE" in gone.peer_gone.reason


MAJOR = PROTOCOL[0]


async def opened(address: str, first: w.PeerMessage) -> Any:
    channel = grpc.aio.insecure_channel(address)
    stub: Any = worker_pb2_grpc.WorkerStub(channel)
    call = stub.Peer(metadata=proof(PEER))
    await call.write(first)
    try:
        return await asyncio.wait_for(call.read(), 60)
    finally:
        await channel.close(None)


async def test_a_later_minor_version_is_welcome_and_what_it_adds_is_ignored() -> None:
    async with serving(Backend()) as (_, address):
        answer: w.PeerHello = (await opened(address, hello(MAJOR, PROTOCOL[1] + 7))).hello
    assert (answer.protocol, answer.protocol_minor, answer.peer_incarnation) == (*PROTOCOL, 5)


def test_fields_of_a_later_minor_version_do_not_hide_the_known_ones() -> None:
    asked = w.TicketRequest(request="r", attempt=1, profile=w.KvProfile(fingerprint="f", tp=1))
    later = w.TicketRequest.FromString(asked.SerializeToString() + NOVELTY)
    assert (later.request, later.attempt, later.profile.fingerprint) == ("r", 1, "f")
    assert later.SerializeToString() != asked.SerializeToString()  # it really is there


@pytest.mark.parametrize("major", [MAJOR - 1, MAJOR + 1])
async def test_another_major_version_is_refused_with_the_reason(major: int) -> None:
    async with serving(Backend()) as (_, address):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await opened(address, hello(major, 0))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"protocol differs: {major}.0 and {MAJOR}." in (refused.value.details() or "")
        assert "update the older worker" in (refused.value.details() or "")


async def dialled(major: int, minor: int) -> e.HostToRank:
    """Return rank 0's answer after it sent a ticket request to a stranger."""
    server = grpc.aio.server(options=PROOF_OF_LIFE)
    worker_pb2_grpc.add_WorkerServicer_to_server(Stranger(major, minor), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    backend = Backend()
    try:
        async with asyncio.TaskGroup() as tasks:
            channels = PeerChannels(backend, SECRET, tasks)
            asked = w.PeerMessage(ticket_request=w.TicketRequest(request="r"))
            to = for_peer(asked, f"127.0.0.1:{port}", 5)
            assert channels.send(to)
            heard = await asyncio.wait_for(backend.got.get(), 60)
            channels.close()
    finally:
        await server.stop(None)
    return heard


def test_the_dialling_side_refuses_too() -> None:
    gone = asyncio.run(dialled(MAJOR + 1, 0)).peer_gone
    assert gone.worker == "d0"
    assert f"protocol differs: {MAJOR + 1}.0 and {MAJOR}." in gone.reason


def test_the_dialling_side_talks_to_a_later_minor_version() -> None:
    heard = asyncio.run(dialled(MAJOR, 7))
    assert heard.peer.message.ticket.request == "r"


def test_every_kind_of_message_is_of_the_first_minor_version() -> None:
    """So none depends on the agreed one. A kind that is added raises the minor version, is sent to peers that have it
    alone, and is not listed here."""
    known = "hello ticket_request ticket ticket_refused complete verified failed ping fetch_request fetch_offer revoked"
    kinds = {field.name for field in w.PeerMessage.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds == {*known.split(), "queued", "holding"}
    assert PROTOCOL == (2, 0)


async def test_a_rank_that_hangs_while_it_loads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "MODULE", hanging_rank.__name__)
    monkeypatch.setattr(hosting, "LOADING_LOOKS", 2)
    ClusterSecret.generate().save(tmp_path / "secret")
    config = WorkerConfig(
        cluster="test", worker_id="m0", role=RoleName.MIXED, pool="mixed", model="none", model_dir=str(tmp_path),
        revision="", dtype="float32", max_model_len=0, redis_url="redis://127.0.0.1:1", runtime_dir=str(tmp_path),
        secret_file=str(tmp_path / "secret"), settings=WorkerSection(threads=1, tp=2),
    )  # fmt: skip
    host = WorkerHost(config, tmp_path / "config", on_progress=lambda _: None)
    with pytest.raises(ExceptionGroup) as raised:
        await host.run(lambda _: None)
    (why,) = _causes(raised.value)
    assert isinstance(why, WorkerLostError)
    assert "rank 0 hangs while it loads" in str(why)
    pids = host._ranks.pids
    assert len(pids) == 2
    assert all(pids)
    assert not any(is_alive(pid) for pid in pids)


def _causes(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [cause for inner in error.exceptions for cause in _causes(inner)]
    return [error]
