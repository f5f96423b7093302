"""The peer in a process of its own: bit exactness, and death in the middle of a push."""

import hashlib
import random
from dataclasses import asdict
from typing import Any

from tandem.core.ids import BlockId, GroupId
from tandem.kvtransfer.events import Failed, SendCompleted, SendFailed, Verified
from tools.ticket_json import as_json

G0 = GroupId(0)
BLOCKS = 512


def options(rig: Any, **more: Any) -> dict[str, Any]:
    return {"spec": asdict(rig.DENSE), "num_blocks": BLOCKS, "seed": 0} | more


def test_a_push_to_another_process_is_bit_exact(rig: Any) -> None:
    peer = rig.peer("receiver", **options(rig))
    source = rig.side(num_blocks=BLOCKS, seed=9)
    sender = rig.sender(source)
    expected = bytearray(len(source.memory[G0]))
    step, order = rig.DENSE.block_bytes(), random.Random(3)
    free = order.sample(range(BLOCKS), BLOCKS)
    for _ in range(3):
        src, dst = order.sample(range(BLOCKS), 120), [free.pop() for _ in range(120)]
        ticket = rig.ticket(peer.endpoints(), {0: dst})
        peer.command("expect", ticket=as_json(ticket))
        assert peer.read()["event"] == "expected"
        sender.open(ticket)
        for layers in (range(2), range(2, 4)):
            sender.push(ticket.transfer, G0, tuple(map(BlockId, src)), tuple(map(BlockId, dst)), layers)
        sender.finish(ticket.transfer)
        assert read_past(peer, "writing")["event"] == "Verified"
        assert isinstance(source.event(), SendCompleted)
        for here, there in zip(src, dst, strict=True):
            expected[there * step : (there + 1) * step] = source.block(0, here)
    peer.command("digest")
    told = peer.read()
    assert told["digest"] == hashlib.sha256(expected).hexdigest()
    assert told["counters"]["blocks"] == 360


def test_a_push_from_another_process_is_bit_exact(rig: Any) -> None:
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", **options(rig, seed=6))
    ticket = rig.ticket(receiver.endpoints(), {0: range(BLOCKS)})
    receiver.expect(ticket)
    peer.command("push", ticket=as_json(ticket))
    verified = target.event()
    assert isinstance(verified, Verified)
    assert 0 < verified.last_wire_s < rig.patience_s  # one machine, one clock
    assert target.memory[G0] == random.Random(6).randbytes(len(target.memory[G0]))
    assert peer.read()["event"] == "SendCompleted"


def test_a_killed_sender_fails_its_transfers_at_the_receiver(rig: Any) -> None:
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", **options(rig, seed=6))
    target.pools[G0].write_gate.clear()
    ticket = rig.ticket(receiver.endpoints(), {0: range(BLOCKS)})
    receiver.expect(ticket)
    peer.command("push", ticket=as_json(ticket))
    assert target.pools[G0].writing.wait(rig.patience_s)
    peer.process.kill()
    peer.process.wait()
    target.pools[G0].write_gate.set()
    failed = target.event()
    assert isinstance(failed, Failed)
    assert "lost" in failed.reason
    receiver.cancel(ticket.transfer)
    assert receiver.counters()["open"] == 0


def test_a_sender_killed_before_its_push_is_complete_is_noticed(rig: Any) -> None:
    target = rig.side(num_blocks=BLOCKS)
    receiver = rig.receiver(target)
    peer = rig.peer("sender", **options(rig, seed=6))
    promised = rig.ticket(receiver.endpoints(), {0: [1, 2]})
    receiver.expect(promised)
    part = rig.ticket(receiver.endpoints(), {0: [1]}, transfer=promised.transfer)
    peer.command("push_without_finish", ticket=as_json(part))
    assert target.pools[G0].writing.wait(rig.patience_s)
    peer.process.kill()
    assert isinstance(target.event(), Failed)


def test_a_killed_receiver_fails_the_push_at_the_sender(rig: Any) -> None:
    peer = rig.peer("receiver", **options(rig, hangs=True))
    source = rig.side(num_blocks=BLOCKS, seed=9)
    sender = rig.sender(source)
    ticket = rig.ticket(peer.endpoints(), {0: range(BLOCKS)})
    peer.command("expect", ticket=as_json(ticket))
    assert peer.read()["event"] == "expected"
    sender.open(ticket)
    blocks = tuple(map(BlockId, range(BLOCKS)))
    sender.push(ticket.transfer, G0, blocks, blocks, range(4))
    sender.finish(ticket.transfer)
    assert peer.read()["event"] == "writing"
    peer.process.kill()
    event = source.event()
    assert isinstance(event, SendFailed)
    assert "ended" in event.reason
    assert sender.links() == ()


def read_past(peer: Any, noise: str) -> dict[str, Any]:
    """The next event that is not `noise`."""
    while (event := peer.read())["event"] == noise:
        pass
    return dict(event)
