"""Features of `cuda_ipc` beyond the conformance suite, on its twin in host memory: the ring in the sender's memory,
reads from it while it is taken back, and the checksum that the device takes."""

import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.core.clock import MonotonicClock
from tandem.core.ids import BlockId, GroupId, Rank, WorkerId
from tandem.core.kv_layout import KVLayout
from tandem.kernels.payload_checksum import payload_checksum
from tandem.kvtransfer import frame_checks
from tandem.kvtransfer.events import Failed, Quiesced, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.frame import Checksum, encode
from tandem.kvtransfer.probed_connection import PINGS, ProbedConnection
from tandem.kvtransfer.transports import ipc
from tandem.kvtransfer.transports.base import LinkClosedError, Peer
from tandem.kvtransfer.transports.device_memory import HostMemory
from tandem.kvtransfer.transports.ipc import MAX_IPC_PAYLOAD_BYTES, PRELUDE, IpcLink
from tandem.kvtransfer.transports.ipc_listener import _Landing
from tests.integration.kvtransfer.raw import make_frame
from tests.integration.kvtransfer.rig import Rig
from tools.waiting import wait_for

G0 = GroupId(0)
Fill = Callable[[socket.socket], None]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig("cpu_ipc", tmp_path)
    yield made
    made.close()


def ids(numbers: Any) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


def begin(rig: Rig, blocks: int = 8, *, source: Any = None, target: Any = None, **ticket: Any) -> tuple[Any, ...]:
    """(source, target, sender, receiver, ticket), opened and expected."""
    source, target = source or rig.side(seed=1), target or rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    made = rig.ticket(receiver.endpoints(), {0: range(blocks)}, **ticket)
    receiver.expect(made)
    sender.open(made)
    return source, target, sender, receiver, made


def push(sender: Any, ticket: Any, blocks: int = 8) -> None:
    Rig.push_all(sender, ticket, range(blocks), range(blocks))


def link_of(sender: Any) -> IpcLink:
    (peer_link,) = sender._links.values()
    assert isinstance(peer_link._link, IpcLink)
    return peer_link._link


def test_payloads_do_not_leave_the_device(rig: Rig) -> None:
    source, target, sender, _receiver, ticket = begin(rig, 64)
    push(sender, ticket, 64)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert target.image() == source.image()
    frames = -(-64 * rig.DENSE.block_bytes() // link_of(sender).max_payload_bytes)
    assert source.pools[G0].gathered == target.pools[G0].scattered == frames
    assert link_of(sender)._bounce is None


def test_frames_are_as_large_as_the_ring_allows(rig: Rig) -> None:
    source, target = rig.side(num_blocks=1024, seed=1), rig.side(num_blocks=1024)
    receiver, sender = rig.receiver(target, ring_bytes=64 << 20), rig.sender(source)
    ticket = rig.ticket(receiver.endpoints(), {0: range(1024)})
    receiver.expect(ticket)
    sender.open(ticket)
    push(sender, ticket, 1024)
    assert isinstance(target.event(), Verified)
    assert target.image() == source.image()
    assert receiver.counters()["frames"] == 1024 * rig.DENSE.block_bytes() // MAX_IPC_PAYLOAD_BYTES == 2


@pytest.mark.parametrize("is_checked", [True, False])
def test_what_the_sender_gave_up_while_it_was_read_does_not_count(
    rig: Rig, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are here and right, but the source belongs to others since the fence. Unchecked it would count."""
    if not is_checked:
        monkeypatch.setattr(frame_checks, "is_current", lambda payload: True)
    source, target, sender, receiver, ticket = begin(rig)
    target.pools[G0].write_gate.clear()
    sender.push(ticket.transfer, G0, ids(range(8)), ids(range(8)), range(4))
    assert target.pools[G0].writing.wait(rig.patience_s)
    sender.cancel(ticket.transfer)  # waits for no receiver
    assert source.event() == Quiesced(transfer=ticket.transfer)
    target.pools[G0].write_gate.set()
    outcome = target.event()
    if is_checked:
        assert outcome == Failed(transfer=ticket.transfer, reason="the sender gave up")
        assert receiver.counters()["dropped_withdrawn"] == 1
    else:
        assert isinstance(outcome, Verified)


def test_what_is_given_up_between_gather_and_sending_does_not_count(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, sender, receiver, ticket = begin(rig)
    usual = IpcLink.commit_on_device

    def late(self: IpcLink, frame: Any, room: Any) -> None:
        sender.cancel(ticket.transfer)
        usual(self, frame, room)

    monkeypatch.setattr(IpcLink, "commit_on_device", late)
    sender.push(ticket.transfer, G0, ids(range(8)), ids(range(8)), range(4))
    assert source.event() == Quiesced(transfer=ticket.transfer)
    assert target.event() == Failed(transfer=ticket.transfer, reason="the sender gave up")
    assert receiver.counters()["frames"] == 0


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_place_that_is_given_to_another_frame_while_it_is_read_is_noticed(
    rig: Rig, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_checked:
        monkeypatch.setattr(frame_checks, "is_current", lambda payload: True)
    target = rig.side()
    receiver = rig.receiver(target)
    ticket = rig.ticket(receiver.endpoints(), {0: (0,)})
    receiver.expect(ticket)
    link: Any = rig.dial(receiver.endpoints()[0])
    target.pools[G0].write_gate.clear()
    link.send(*make_frame(rig, ticket))
    assert target.pools[G0].writing.wait(rig.patience_s)
    link.link._ring.words.publish(1 + 256)  # the word's next owner
    link.link._ring.staging.tensor.fill_(0xEE)
    target.pools[G0].write_gate.set()
    assert isinstance(target.event(), Failed if is_checked else Verified)
    assert receiver.counters()["dropped_withdrawn"] == int(is_checked)


def flipped(payload: torch.Tensor) -> None:
    payload[12_345] ^= 4


def swapped(payload: torch.Tensor) -> None:
    payload[:64], payload[4096:4160] = payload[4096:4160].clone(), payload[:64].clone()


def cut(payload: torch.Tensor) -> None:
    payload[len(payload) // 2 :] = 0


def shifted(payload: torch.Tensor) -> None:
    payload[2:] = payload[:-2].clone()


@pytest.mark.parametrize("change", [flipped, swapped, cut, shifted])
def test_bytes_that_change_in_the_ring_fail_both_ends(
    rig: Rig, change: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, sender, receiver, ticket = begin(rig, 16)
    usual, kinds = IpcLink.commit_on_device, []

    def commit(self: IpcLink, frame: Any, room: Any) -> None:
        kinds.append(frame.checksum)
        change(self._ring.staging.tensor[self._offset : self._offset + len(room)])
        usual(self, frame, room)

    monkeypatch.setattr(IpcLink, "commit_on_device", commit)
    push(sender, ticket, 16)
    failed = target.event()
    assert isinstance(failed, Failed)
    assert "checksum mismatch" in failed.reason
    assert isinstance(source.event(), SendFailed)
    assert receiver.counters()["dropped_checksum"] == 1
    assert set(kinds) == {Checksum.DEVICE}


@pytest.mark.parametrize(("from_device", "to_device"), [("cpu", ""), ("", "cpu"), ("", "")])
@pytest.mark.parametrize("codec", ["", "int8"])
def test_pools_in_host_memory_and_codecs_go_the_long_way(
    rig: Rig, from_device: str, to_device: str, codec: str
) -> None:
    source, target = rig.side(seed=1, device=from_device), rig.side(device=to_device)
    source, target, sender, receiver, ticket = begin(rig, source=source, target=target, codec=codec)
    push(sender, ticket)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    if not codec:
        assert [target.block(0, b) for b in range(8)] == [source.block(0, b) for b in range(8)]
    assert any(target.block(0, 7))
    assert receiver.counters()["blocks"] == 8


def test_tokens_are_cut_into_the_receiver_s_blocks_on_the_device(rig: Rig) -> None:
    wide = replace(rig.DENSE, block_tokens=32)
    source, target = rig.side(seed=1), rig.side(wide)
    receiver, sender = rig.receiver(target), rig.sender(source)
    ticket = rig.ticket(receiver.endpoints(), {0: [4, 2]}, layout=KVLayout(groups=(wide,)))
    receiver.expect(ticket)
    sender.open(ticket)
    rig.push_all(sender, ticket, [7, 3, 9], [4, 2])
    assert isinstance(target.event(), Verified)
    sent, got = (side.pools[G0]._pool[[*blocks]] for side, blocks in ((source, (7, 3, 9)), (target, (4, 2))))
    sent, got = (part.view(torch.int16).permute(0, 4, 1, 2, 3, 5).reshape(-1, 4, 2, 4, 32) for part in (sent, got))
    assert torch.equal(got[:48], sent)
    assert not got[48:].any()
    assert source.pools[G0].gathered == 1
    assert link_of(sender)._bounce is None


def test_it_is_measured_without_a_way_over_the_host(rig: Rig) -> None:
    receiver = rig.receiver(rig.side())
    link: Any = rig.dial(receiver.endpoints()[0]).link
    line = ProbedConnection(link, on_reply=lambda _: None, on_end=lambda *_: None, clock=MonotonicClock())
    line.start()
    measured = line.measure(Rank(0))
    assert measured.bytes_per_s > 0
    assert measured.latency_s > 0
    assert receiver.counters()["probes"] > PINGS
    assert receiver.counters()["dropped_checksum"] == 0
    assert link._bounce is None
    line.link.close()
    line._thread.join()


class Poll:
    """A poll object that notes how long it is waited for."""

    def __init__(self, waits_ms: list[float | None]) -> None:
        self._poll, self._waits_ms = select.poll(), waits_ms
        self.register = self._poll.register

    def poll(self, within_ms: float | None) -> list[tuple[int, int]]:
        self._waits_ms.append(within_ms)
        return self._poll.poll(within_ms)


def test_the_ring_outlives_its_link_while_it_is_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_ms: list[float | None] = []
    monkeypatch.setattr(ipc, "select", SimpleNamespace(poll=lambda: Poll(waits_ms), POLLIN=select.POLLIN))
    source, target, sender, _receiver, ticket = begin(rig)
    target.pools[G0].write_gate.clear()
    sender.push(ticket.transfer, G0, ids(range(8)), ids(range(8)), range(4))
    assert target.pools[G0].writing.wait(rig.patience_s)
    ring = link_of(sender)._ring
    sender.close()
    assert isinstance(source.event(), SendFailed)
    assert ring.staging.tensor is not None
    assert any(thread.name == "kv-ipc-free" for thread in threading.enumerate())
    assert waits_ms[0] == ipc.WAKE_S * 1000
    target.pools[G0].write_gate.set()
    assert isinstance(target.event(), Failed)
    wait_for(lambda: not any(thread.name == "kv-ipc-free" for thread in threading.enumerate()))
    with pytest.raises(LinkClosedError, match="given back"):
        _ = ring.staging.tensor


def test_a_receiver_that_cannot_map_the_ring_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostMemory, *_: Any) -> Any:
        raise LinkClosedError("the devices do not see each other")

    monkeypatch.setattr(HostMemory, "open", refuse)
    source, _target, _sender, _receiver, _ticket = begin(rig)
    assert "do not see each other" in source.event().reason


@pytest.mark.parametrize("prelude", [(1, 64 << 20), (1, 128), (2, 0), (0, 0)])
def test_a_payload_outside_the_ring_or_out_of_turn_ends_the_connection(rig: Rig, prelude: tuple[int, int]) -> None:
    target = rig.side()
    receiver = rig.receiver(target)
    ticket = rig.ticket(receiver.endpoints(), {0: (0,)})
    receiver.expect(ticket)
    link: Any = rig.dial(receiver.endpoints()[0])
    link.link._socket.send(PRELUDE.pack(*prelude) + encode(make_frame(rig, ticket)[0]))
    with pytest.raises(LinkClosedError, match=r"of a ring|expected 1"):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])


def test_a_sender_that_reads_nothing_cannot_keep_a_link_that_is_closed_on_it(rig: Rig, fill: Fill) -> None:
    """The reason of its link's end cannot be sent to it."""
    listener: Any = rig.receiver(rig.side())._listeners[0]
    peer = Peer(worker=WorkerId("p0"), incarnation=rig.SENDER, rank=Rank(0), host="h")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fill(theirs)
        nowhere: Any = None
        arguments = (theirs, listener._site.intake.connect(peer), _Landing(nowhere, nowhere, nowhere, 0))
        serving = threading.Thread(target=listener._serve, args=arguments, daemon=True)
        serving.start()
        ours.send(b"no frame")
        serving.join(rig.patience_s)
        assert not serving.is_alive()


@pytest.mark.parametrize("offer", [b"", b"x", b"x" * 900])
def test_a_peer_that_offers_nonsense_is_let_go(rig: Rig, offer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the secret, but passes no ring."""
    usual = socket.send_fds

    def send_fds(connection: socket.socket, buffers: Any, descriptors: Any) -> int:
        return usual(connection, [offer or b" "], descriptors[:2])

    monkeypatch.setattr(socket, "send_fds", send_fds)
    source, target, _sender, receiver, ticket = begin(rig)
    assert isinstance(source.event(), SendFailed)
    monkeypatch.undo()
    again = rig.sender(source)
    again.open(ticket)
    push(again, ticket)
    assert isinstance(target.event(), Verified)
    assert receiver.counters()["open"] == 1


def test_a_device_s_checksum_is_refused_where_payloads_come_as_bytes(tmp_path: Path) -> None:
    rig = Rig("shm", tmp_path)
    target = rig.side()
    receiver = rig.receiver(target)
    ticket = rig.ticket(receiver.endpoints(), {0: (0,)})
    receiver.expect(ticket)
    link = rig.dial(receiver.endpoints()[0])
    frame, payload = make_frame(rig, ticket)
    summed = payload_checksum(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    link.send(replace(frame, checksum=Checksum.DEVICE, payload_crc=summed), payload)
    with pytest.raises(LinkClosedError, match="supports CRC-32 only"):
        link.last_words()
    assert isinstance(target.event(), Failed)
    assert not any(target.memory[G0])
    rig.close()
