"""Frames lost, doubled, swapped, late, cut short or flipped on their way: never a wrong byte in a verified transfer."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.ids import Attempt, BlockId, GroupId
from tandem.core.metric_names import KV_CHECKSUM_FAILURES
from tandem.kvtransfer.events import Failed, Quiesced, SendCompleted, SendFailed, Verified
from tandem.kvtransfer.frame import Frame, FrameKind
from tools.waiting import wait_for

G0 = GroupId(0)
BLOCKS = tuple(BlockId(block) for block in range(64))
Sending = tuple[Frame, bytes | None]


def honest(frame: Frame, payload: bytes | None) -> list[Sending]:
    return [(frame, payload)]


class OnData:
    """Tampers with the data frames of one number; everything else passes."""

    def __init__(self, number: int, change: Callable[[Frame, bytes], list[Sending]]) -> None:
        self._left, self._change = number, change

    def __call__(self, frame: Frame, payload: bytes | None) -> list[Sending]:
        if frame.kind is not FrameKind.DATA or payload is None:
            return [(frame, payload)]
        self._left -= 1
        return self._change(frame, payload) if self._left == -1 else [(frame, payload)]


class Reversed:
    """Holds data back until FINISH and sends it in reverse; `finish_first` lets FINISH overtake the last frame."""

    def __init__(self, *, finish_first: bool) -> None:
        self._held: list[Sending] = []
        self._finish_first = finish_first

    def __call__(self, frame: Frame, payload: bytes | None) -> list[Sending]:
        if frame.kind is FrameKind.DATA:
            self._held.append((frame, payload))
            return []
        if frame.kind is not FrameKind.FINISH:
            return [(frame, payload)]
        out, self._held = [*reversed(self._held)], []
        out.insert(len(out) - 1 if self._finish_first else len(out), (frame, payload))
        return out


def move(rig: Any, faults: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Push 64 blocks one by one over a link with these faults: (source, target, receiver)."""
    rig.tamper(monkeypatch, faults)
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    push(rig, sender, receiver, rig.ticket(receiver.endpoints(), {0: BLOCKS}))
    return source, target, receiver


def push(rig: Any, sender: Any, receiver: Any, ticket: Any) -> None:
    receiver.expect(ticket)
    sender.open(ticket)
    for block in BLOCKS:
        sender.push(ticket.transfer, G0, (block,), (block,), range(4))
    sender.finish(ticket.transfer)


@pytest.mark.parametrize("number", [0, 31, 63])
def test_a_lost_frame_fails_both_ends(rig: Any, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, receiver = move(rig, OnData(number, lambda frame, payload: []), monkeypatch)
    failed = target.event()
    assert isinstance(failed, Failed)
    assert "cells missing" in failed.reason
    assert isinstance(source.event(), SendFailed)
    assert receiver.counters()["blocks"] == 63


def test_doubled_frames_change_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, receiver = move(rig, lambda frame, payload: [(frame, payload)] * 2, monkeypatch)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert target.image() == source.image()
    wait_for(lambda: receiver.counters()["dropped_duplicate"] >= 63)  # the last may still wait in another socket
    assert target.events.empty()
    assert source.events.empty()


def test_frames_in_any_order_arrive(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, _receiver = move(rig, Reversed(finish_first=False), monkeypatch)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert target.image() == source.image()


def test_a_finish_that_overtakes_data_is_never_a_wrong_success(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, _receiver = move(rig, Reversed(finish_first=True), monkeypatch)
    outcome = target.event()
    if isinstance(outcome, Verified):  # over several sockets the last frame may still have won
        assert rig.transport == "tcp"
        assert isinstance(source.event(), SendCompleted)
        assert target.image() == source.image()
    else:
        assert "cells missing" in outcome.reason
        assert isinstance(source.event(), SendFailed)
    assert target.events.empty()


@pytest.mark.parametrize("place", [0, 12_345, -1])
def test_a_flipped_payload_bit_fails_both_ends(rig: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(frame: Frame, payload: bytes) -> list[Sending]:
        changed = bytearray(payload)
        changed[place] ^= 4
        return [(frame, bytes(changed))]

    source, target, receiver = move(rig, OnData(20, flip), monkeypatch)
    failed = target.event()
    assert isinstance(failed, Failed)
    assert "checksum mismatch" in failed.reason
    assert isinstance(source.event(), SendFailed)
    assert receiver.counters()["dropped_checksum"] == 1
    by_sender = {name: count for name, count in receiver.counters().items() if name.startswith(KV_CHECKSUM_FAILURES)}
    assert list(by_sender.values()) == [1]


def test_a_truncated_payload_fails_both_ends(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(frame: Frame, payload: bytes) -> list[Sending]:
        return [(replace(frame, payload_bytes=len(payload) // 2), payload[: len(payload) // 2])]

    source, target, receiver = move(rig, OnData(20, truncate), monkeypatch)
    assert isinstance(target.event(), Failed)
    assert isinstance(source.event(), SendFailed)
    assert receiver.counters()["dropped_malformed"] == 1


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.DATA, FrameKind.FINISH])
def test_a_link_that_ends_at_any_frame_fails_both_ends(
    rig: Any, kind: FrameKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)

    def cut(frame: Frame, payload: bytes | None) -> list[Sending]:
        if frame.kind is kind and not seen:
            seen.append(frame)
            (peer_link,) = sender._links.values()
            peer_link._link.close()
            return []
        return [(frame, payload)]

    seen: list[Frame] = []
    rig.tamper(monkeypatch, cut)
    push(rig, sender, receiver, rig.ticket(receiver.endpoints(), {0: (*BLOCKS,)}))
    assert isinstance(source.event(), SendFailed)
    outcome = target.event()
    if kind is FrameKind.FINISH and isinstance(outcome, Verified):  # the data had all arrived
        assert target.image() == source.image()
    else:
        assert isinstance(outcome, Failed)
    assert target.events.empty()


def test_late_frames_of_an_old_attempt_are_dropped(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Sending] = []

    def delay(frame: Frame, payload: bytes | None) -> list[Sending]:
        if frame.attempt == 1 and frame.kind is FrameKind.DATA:
            held.append((frame, payload))
            return []
        if frame.kind is FrameKind.FINISH:
            return [*held, (frame, payload)]
        return [(frame, payload)]

    rig.tamper(monkeypatch, delay)
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    first = rig.ticket(receiver.endpoints(), {0: BLOCKS})
    receiver.expect(first)
    sender.open(first)
    for block in BLOCKS[:10]:
        sender.push(first.transfer, G0, (block,), (block,), range(4))
    barrier = rig.ticket(receiver.endpoints(), {0: ()})  # the link works in order: behind it, all ten are held
    receiver.expect(barrier)
    assert isinstance(target.event(), Verified)
    sender.open(barrier)
    sender.finish(barrier.transfer)
    assert isinstance(source.event(), SendCompleted)
    held_then = len(held)
    receiver.cancel(first.transfer)
    sender.cancel(first.transfer)
    assert isinstance(source.event(), Quiesced)
    source.memory[G0][:] = random.Random(8).randbytes(len(source.memory[G0]))  # its blocks belong to others now
    push(rig, sender, receiver, rig.ticket(receiver.endpoints(), {0: BLOCKS}, attempt=Attempt(2)))
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert held_then == 10
    assert target.image() == source.image()
    assert receiver.counters()["dropped_fenced"] >= 10


def test_frames_of_an_old_incarnation_are_dropped(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def old(frame: Frame, payload: bytes | None) -> list[Sending]:
        return [(replace(frame, source_incarnation=5), payload), (frame, payload)]  # type: ignore[arg-type]

    source, target, receiver = move(rig, old, monkeypatch)
    assert receiver.counters()["frames"] <= 64
    outcome = source.event()  # the sender receives the refusals
    assert isinstance(outcome, SendFailed)
    assert "wrong_incarnation" in outcome.reason
    assert receiver.counters()["dropped_wrong_incarnation"] >= 1
    assert isinstance(target.event(), Verified | Failed)


@pytest.fixture
def wired_rig(rig: Any) -> Any:
    if rig.transport not in ("tcp", "grpc"):
        pytest.skip("no bytes of this transport cross a network")
    return rig


@pytest.mark.parametrize("seed", range(12))
def test_a_bit_flipped_on_the_network_is_never_a_wrong_success(wired_rig: Any, seed: int) -> None:
    rig, order = wired_rig, random.Random(seed)
    source, target = rig.side(seed=1), rig.side()
    receiver, sender = rig.receiver(target), rig.sender(source)
    proxy = rig.proxy(receiver.endpoints()[0])
    warm_up = rig.ticket([proxy.endpoint], {0: BLOCKS[:1]})
    receiver.expect(warm_up)
    sender.open(warm_up)
    sender.push(warm_up.transfer, G0, BLOCKS[:1], BLOCKS[:1], range(4))
    sender.finish(warm_up.transfer)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    to_receiver = seed % 3 != 0
    proxy.flip(to_receiver=to_receiver, after_bytes=order.randrange(len(target.memory[G0]) if to_receiver else 100))
    ticket = rig.ticket([proxy.endpoint], {0: BLOCKS})
    push(rig, sender, receiver, ticket)
    said = source.event_within(2)
    if said is None:  # a flipped length may leave the other end waiting: the roles' deadline ends it
        sender.cancel(ticket.transfer)
        said = source.event()
    received = target.event_within(2)
    if received is None:
        receiver.cancel(ticket.transfer)
    if isinstance(received, Verified):
        assert target.image() == source.image()
    if isinstance(said, SendCompleted):
        assert isinstance(received, Verified)
    assert target.events.empty()


def test_a_cut_network_fails_both_ends_and_a_new_link_works(wired_rig: Any) -> None:
    rig = wired_rig
    source, target = rig.side(seed=1), rig.side()
    target.pools[G0].write_gate.clear()
    receiver, sender = rig.receiver(target), rig.sender(source)
    proxy = rig.proxy(receiver.endpoints()[0])
    push(rig, sender, receiver, rig.ticket([proxy.endpoint], {0: BLOCKS}))
    assert target.pools[G0].writing.wait(rig.patience_s)
    proxy.cut()
    assert isinstance(source.event(), SendFailed)
    target.pools[G0].write_gate.set()
    assert isinstance(target.event(), Failed)
    again = rig.ticket([proxy.endpoint], {0: BLOCKS}, attempt=Attempt(2))
    push(rig, sender, receiver, again)
    assert isinstance(target.event(), Verified)
    assert isinstance(source.event(), SendCompleted)
    assert target.image() == source.image()
