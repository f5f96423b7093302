"""Faults on the sending side of the wire: every link of the process passes its frames through here."""

from __future__ import annotations

import functools
import random
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from proof.transfer.plan import Fault
from tandem.core.ids import Attempt, Incarnation, TransferId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import Frame, FrameKind, encode
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports import dialer
from tandem.kvtransfer.transports.base import Link, Peer
from tandem.kvtransfer.transports.registry import TRANSPORTS
from tests.integration.kvtransfer.faults import FaultyLink, Sending
from tests.integration.kvtransfer.raw import Raw

WRONG = 0x7E57
"""An incarnation that no worker has."""


class Tampering:
    """Faults of frames, by transfer. `on_hit(transfer, kind, dest_rank)` runs on a link's thread, with no lock held."""

    def __init__(self, on_hit: Callable[[TransferId, str, int], None]) -> None:
        self._on_hit = on_hit
        self._lock = threading.Lock()  # guards the rest
        self._faults: dict[TransferId, Fault] = {}
        self._frames: Counter[TransferId] = Counter()
        self._held: defaultdict[tuple[TransferId, int], list[Sending]] = defaultdict(list)
        self._late: defaultdict[tuple[int, int], list[Sending]] = defaultdict(list)
        self._late_of: set[TransferId] = set()

    def install(self) -> None:
        """Every link that is dialled from now on is tampered with."""
        tampered = {}
        for name, transport in TRANSPORTS.items():

            def dial(
                endpoint: Endpoint, peer: Peer, secret: ClusterSecret, usual: Callable[..., Link] = transport.dial
            ) -> Link:
                link = usual(endpoint, peer, secret)
                return FaultyLink(link, functools.partial(self._pass, link))

            tampered[name] = replace(transport, dial=dial)
        dialer.TRANSPORTS = tampered  # type: ignore[attr-defined]

    def plan(self, transfer: TransferId, fault: Fault) -> None:
        with self._lock:
            self._faults[transfer] = fault

    def reset(self) -> None:
        with self._lock:
            for kept in (self._faults, self._frames, self._held, self._late, self._late_of):
                kept.clear()

    def _pass(self, link: Link, frame: Frame, payload: bytes | None) -> list[Sending]:
        """Frames sent in the frame's place."""
        with self._lock:
            fault = self._faults.get(frame.transfer)
            before: list[Sending] = []
            if frame.kind is FrameKind.DATA and frame.transfer not in self._late_of:
                before = self._late.pop((frame.source_rank, frame.dest_rank), [])
            if fault is None or frame.source_rank != fault.source_rank:
                return [*before, (frame, payload)]
            if frame.kind is FrameKind.FINISH:
                return self._at_finish(fault, frame)
            if frame.kind is not FrameKind.DATA or payload is None:
                return [(frame, payload)]
            number = self._frames[frame.transfer]
            self._frames[frame.transfer] += 1
            held = self._held_back(fault, number, frame, payload)
        if held:
            if fault.kind == "late" or number == fault.at:
                self._on_hit(frame.transfer, fault.kind, frame.dest_rank)
            return before
        sent, is_hit = _changed(link, fault, number, frame, payload)
        if is_hit:
            self._on_hit(frame.transfer, fault.kind, frame.dest_rank)
        return [*before, *sent]

    def _held_back(self, fault: Fault, number: int, frame: Frame, payload: bytes) -> bool:
        if fault.kind == "late" and number >= fault.at:
            self._late_of.add(frame.transfer)
            self._late[frame.source_rank, frame.dest_rank].append((frame, payload))
            return True
        if fault.kind == "shuffle" or (fault.kind == "finish_first" and number >= fault.at):
            self._held[frame.transfer, frame.dest_rank].append((frame, payload))
            return True
        return False

    def _at_finish(self, fault: Fault, frame: Frame) -> list[Sending]:
        held = self._held.pop((frame.transfer, frame.dest_rank), [])
        random.Random(fault.place).shuffle(held)
        finish: list[Sending] = [(frame, None)]
        return [*finish, *held] if fault.kind == "finish_first" else [*held, *finish]


def _changed(link: Link, fault: Fault, number: int, frame: Frame, payload: bytes) -> tuple[list[Sending], bool]:
    """(the frames sent, True if the fault hit)."""
    good: Sending = (frame, payload)
    if fault.kind in ("duplicate", "stale_attempt", "old_incarnation_too") and number >= fault.at:
        other = bytes(byte ^ 0x5A for byte in payload[:64]) + payload[64:]
        crc = zlib.crc32(other)
        if fault.kind == "duplicate":
            return [good, good], True
        if fault.kind == "stale_attempt":
            return [(replace(frame, attempt=Attempt(frame.attempt - 1), payload_crc=crc), other), good], True
        return [(replace(frame, source_incarnation=Incarnation(WRONG), payload_crc=crc), other), good], True
    if number != fault.at:
        return [good], False
    place = int(fault.place * len(payload))
    match fault.kind:
        case "flip_payload":
            flipped = bytearray(payload)
            flipped[place] ^= 1 << number % 8
            return [(frame, bytes(flipped))], True
        case "flip_header":
            head = bytearray(encode(frame))
            head[int(fault.place * len(head))] ^= 1 << number % 8
            Raw(link, link.transport).send_bytes(bytes(head), b"" if link.transport == "shm" else payload)
            return [], True
        case "truncate":
            return [(replace(frame, payload_bytes=place), payload[:place])] if place else [], True
        case "drop":
            return [], True
        case "wrong_source_incarnation":
            return [(replace(frame, source_incarnation=Incarnation(WRONG)), payload)], True
        case "wrong_dest_incarnation":
            return [(replace(frame, dest_incarnation=Incarnation(WRONG)), payload)], True
        case "link_down":
            link.close()
            return [], True
        case "cancel_sender" | "new_incarnation":
            return [good], True
    return [good], False
