"""Two workers of different protocol versions: equal majors talk, with any minors; others get the reason of refusal."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.core.call_proof import PEER
from tandem.core.kv_compatibility import PROTOCOL
from tandem.core.lease_timing import PROOF_OF_LIFE
from tandem.rpc.v1 import engine_pb2 as e
from tandem.rpc.v1 import worker_pb2 as w
from tandem.rpc.v1 import worker_pb2_grpc
from tandem.workerhost.peer_channels import PeerChannels
from tests.integration.workerhost.service import NOVELTY, SECRET, Backend, Stranger, for_peer, hello, proof, serving

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


def test_a_later_minor_version_is_welcome_and_what_it_adds_is_ignored() -> None:
    async def run() -> w.PeerHello:
        async with serving(Backend()) as (_, address):
            answer: w.PeerMessage = await opened(address, hello(MAJOR, PROTOCOL[1] + 7))
            return answer.hello

    answer = asyncio.run(run())
    assert (answer.protocol, answer.protocol_minor, answer.peer_incarnation) == (*PROTOCOL, 5)


def test_fields_of_a_later_minor_version_do_not_hide_the_known_ones() -> None:
    asked = w.TicketRequest(request="r", attempt=1, profile=w.KvProfile(fingerprint="f", tp=1))
    later = w.TicketRequest.FromString(asked.SerializeToString() + NOVELTY)
    assert (later.request, later.attempt, later.profile.fingerprint) == ("r", 1, "f")
    assert later.SerializeToString() != asked.SerializeToString()  # it really is there


@pytest.mark.parametrize("major", [MAJOR - 1, MAJOR + 1])
def test_another_major_version_is_refused_with_the_reason(major: int) -> None:
    async def run() -> None:
        async with serving(Backend()) as (_, address):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await opened(address, hello(major, 0))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"protocol differs: {major}.0 and {MAJOR}." in (refused.value.details() or "")
            assert "update the older worker" in (refused.value.details() or "")

    asyncio.run(run())


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
