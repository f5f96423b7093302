"""Behaviour of a gRPC stream alone: it may end while messages wait in this process, or lose a peer that is stopped."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import Failed, SendFailed, Verified
from tandem.kvtransfer.transports import grpc_listener
from tests.integration.kvtransfer.rig import Rig
from tools.ticket_json import as_json
from tools.waiting import wait_for

G0 = GroupId(0)


@pytest.fixture
def grpc_rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig("grpc", tmp_path)
    yield made
    made.close()


def test_nothing_is_taken_from_a_stream_that_has_ended(grpc_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames behind the frame in hand would belong to a transfer that no code fails any more."""
    target = grpc_rig.side()
    receiver = grpc_rig.receiver(target)
    endpoint = receiver.endpoints()[0]
    first, second = grpc_rig.ticket([endpoint], {0: [1]}), grpc_rig.ticket([endpoint], {0: [2]})
    payload = bytes(range(256)) * (grpc_rig.DENSE.block_bytes() // 256)
    ended = threading.Event()
    end = grpc_listener._Feed.end

    def noted(feed: Any, reason: str) -> None:
        end(feed, reason)
        ended.set()

    monkeypatch.setattr(grpc_listener._Feed, "end", noted)
    raw = grpc_rig.dial(endpoint)
    listener: Any = receiver._listeners[0]
    receiver.expect(first)
    pool = target.pools[G0]
    pool.write_gate.clear()
    try:
        raw.send(grpc_rig.block(first, payload), payload)
        assert pool.writing.wait(grpc_rig.patience_s)
        raw.send(grpc_rig.block(second, payload), payload)
        wait_for(lambda: any(fetcher._messages for fetcher in listener._fetchers))
        raw.link.close()
        assert ended.wait(grpc_rig.patience_s)
        receiver.expect(second)
    finally:
        pool.write_gate.set()
    complete, failed = target.event(), target.event()
    assert isinstance(complete, Verified)  # the frame in hand was all of it
    assert isinstance(failed, Failed)
    assert (complete.transfer, failed.transfer) == (first.transfer, second.transfer)
    assert target.block(0, 2) == bytes(len(payload))
    wait_for(lambda: not listener._fetchers)
    assert target.events.empty()


def test_a_receiver_that_is_stopped_is_given_up(grpc_rig: Rig) -> None:
    """By itself gRPC waits for more than a minute for the answer to a ping."""
    blocks = tuple(map(BlockId, range(64)))
    peer = grpc_rig.peer("receiver", spec=asdict(grpc_rig.DENSE), num_blocks=64, seed=0, halts_at=0)
    source = grpc_rig.side(num_blocks=64, seed=9)
    sender, ticket = grpc_rig.sender(source), grpc_rig.ticket(peer.endpoints(), {0: range(64)})
    peer.command("expect", ticket=as_json(ticket))
    assert peer.read()["event"] == "expected"
    sender.open(ticket)
    sender.push(ticket.transfer, G0, blocks, blocks, range(4))
    while peer.read()["event"] != "halted":
        pass
    peer.process.send_signal(signal.SIGSTOP)
    try:
        assert isinstance(source.event(), SendFailed)
    finally:
        peer.process.send_signal(signal.SIGCONT)
    peer.command("go")
