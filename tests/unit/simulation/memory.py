"""KV links in memory: frames and replies lie in queues until a test delivers, loses, doubles, cuts or spoils them.

What stands above is real: `PeerLink` without its threads, `FrameWriter`, the frame codec, `ReceiverCore`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import ClassVar

from tandem.core.ids import TransferId
from tandem.core.secret import ClusterSecret
from tandem.kvtransfer.frame import Frame, FrameReply, MalformedFrameError, decode, encode
from tandem.kvtransfer.peer_link import PeerLink
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports import registry
from tandem.kvtransfer.transports.base import Link, LinkClosedError, Peer
from tandem.kvtransfer.transports.dialer import DialCandidate
from tandem.kvtransfer.transports.listener_config import ListenerConfig
from tandem.kvtransfer.transports.registry import Transport

NAME = "memory"
WINDOW_FRAMES = 4
Packet = tuple[bytes, bytes]
"""A frame's head and its payload, as sent."""


class Network:
    """All listeners and connections of a test."""

    def __init__(self, max_payload_bytes: int = 1 << 20) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.intakes: dict[str, ReceiverCore] = {}
        self.wires: list[Wire] = []
        self.links: list[ManualLink] = []
        self.landing: Frame | None = None
        """The frame that an intake judges now."""
        self.reading: TransferId | None = None
        """The transfer with a source that a link reads now."""
        self.on_landed: Callable[[Frame], None] = lambda frame: None

    def listen(self, site: ListenerConfig) -> MemoryListener:
        return MemoryListener(self, site)

    def link_type(self) -> type[PeerLink]:
        """For `TransferSender`: links that do one step when a test calls it."""
        network = self

        class Bound(ManualLink):
            pass

        Bound.network = network
        return Bound

    def transport(self) -> Transport:
        def dial(endpoint: Endpoint, peer: Peer, secret: ClusterSecret) -> Link:
            raise AssertionError("links of a test are dialled by their own steps")

        return Transport(name=NAME, dial=dial, listen=self.listen)

    def install(self) -> Callable[[], None]:
        """Make `memory` known to `registry.find`; returns what undoes it."""
        before = registry.TRANSPORTS
        registry.TRANSPORTS = MappingProxyType({**before, NAME: self.transport()})

        def undo() -> None:
            registry.TRANSPORTS = before

        return undo

    def ready_links(self) -> list[ManualLink]:
        """Links that can take a step now."""
        return [link for link in self.links if link.is_ready]


class MemoryListener:
    """Names an intake; connections are made by `ManualLink`."""

    _numbers = itertools.count(1)

    def __init__(self, network: Network, site: ListenerConfig) -> None:
        self._network, self._site = network, site
        self._address = f"memory:{next(self._numbers)}"

    def start(self) -> None:
        self._network.intakes[self._address] = self._site.intake

    def endpoint(self) -> Endpoint:
        return Endpoint(rank=self._site.rank, transport=NAME, host="here", address=self._address)

    def close(self) -> None:
        self._network.intakes.pop(self._address, None)
        for wire in self._network.wires:
            if wire.address == self._address:
                wire.cut("the receiver was closed")
                wire.receiver_notices()


class Wire:
    """One connection. Both ends learn separately that it was cut; until then the receiver takes what is under way."""

    def __init__(self, network: Network, link: ManualLink, address: str, intake: ReceiverCore, peer: Peer) -> None:
        self.network, self.link, self.address, self.intake = network, link, address, intake
        self.inbound: InboundLink = intake.connect(peer)
        self.frames: deque[Packet] = deque()
        self.replies: deque[FrameReply] = deque()
        self.reason = ""
        self.has_sender_noticed = self.has_receiver_noticed = False

    @property
    def is_cut(self) -> bool:
        return bool(self.reason)

    def deliver_frame(self, packet: Packet) -> None:
        """The receiver's side reads one packet, as every transport does."""
        if self.has_receiver_noticed:
            return
        head, payload = packet
        try:
            frame, rest = decode(memoryview(head))
            if len(rest):
                raise MalformedFrameError("trailing bytes")
            self.network.landing = frame
            reply = self.intake.accept(frame, memoryview(bytearray(payload)), self.inbound)
            self.network.on_landed(frame)
        except MalformedFrameError as error:
            self.intake.reject(self.inbound, error)
            self.cut(f"malformed frame: {error}")
            self.receiver_notices()
            return
        finally:
            self.network.landing = None
        if not self.is_cut:
            self.replies.append(reply)

    def deliver_reply(self, reply: FrameReply) -> None:
        if not self.has_sender_noticed:
            self.link.take_reply(reply)

    def cut(self, reason: str) -> None:
        """Nothing that is sent from now on arrives."""
        self.reason = self.reason or reason

    def receiver_notices(self) -> None:
        if not self.has_receiver_noticed:
            self.has_receiver_noticed = True
            self.frames.clear()
            self.intake.disconnect(self.inbound, self.reason)

    def sender_notices(self) -> None:
        if not self.has_sender_noticed:
            self.has_sender_noticed = True
            self.replies.clear()
            self.link.lose(self.reason)


class MemoryLink:
    """The sender's `Link` over a wire. `reserve` never waits: a link without room is not stepped."""

    transport = NAME
    stalls = 0

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._is_closed = False
        self.max_payload_bytes = wire.network.max_payload_bytes

    def reserve(self, size: int) -> memoryview:
        self._check()
        assert size <= self.max_payload_bytes
        return memoryview(bytearray(size))

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        self._check()
        if not self._wire.is_cut:
            self._wire.frames.append((encode(frame), bytes(payload or b"")))

    def replies(self) -> Iterator[FrameReply]:
        raise AssertionError("a test delivers replies itself")

    def close(self) -> None:
        self._is_closed = True
        self._wire.cut("the sender hung up")

    def release(self) -> None:
        return

    def _check(self) -> None:
        if self._is_closed:
            raise LinkClosedError("closed")


class ManualLink(PeerLink):
    """A kept link with the test as its threads: one `step` dials, or sends one frame."""

    network: ClassVar[Network]

    def start(self, options: Sequence[DialCandidate], peer: Peer, secret: ClusterSecret) -> None:
        self._peer = peer
        self._wire: Wire | None = None
        self._writing: Iterator[None] | None = None
        self._transfer = TransferId(0)
        self.is_over = False
        self.network.links.append(self)

    def join(self) -> None:
        self.is_over = True

    @property
    def is_ready(self) -> bool:
        if self.is_over:
            return False
        if self._wire is None:
            return True
        if self._wire.is_cut or len(self._wire.frames) >= WINDOW_FRAMES:
            return False
        return self._writing is not None or not self._jobs.empty()

    def step(self) -> None:
        """Dial, or send one frame."""
        if self._wire is None:
            self._dial_now()
            return
        assert self._link is not None
        self.network.reading = self._transfer
        try:
            if self._writing is None:
                job = self._jobs.get_nowait()
                if job is None:
                    self.lose("the sender closed it")
                    return
                self.network.reading = self._transfer = job.outgoing.ticket.transfer
                self._writing = self._writer.write(self._link, job)
            if next(self._writing, self) is self:
                self._writing = None
        except LinkClosedError:
            self._writing = None
        finally:
            self.network.reading = None

    def take_reply(self, reply: FrameReply) -> None:
        self._on_reply(self, reply)

    def lose(self, reason: str) -> None:
        """Act as the reply thread does when the connection ends."""
        if not self.is_over:
            self.is_over = True
            self.close()
            self._on_lost(self, reason)

    def _dial_now(self) -> None:
        address = self.key.endpoints[0].address
        intake = self.network.intakes.get(address)
        if intake is None or self._is_closed:
            self.lose("nobody listens there")
            return
        self._wire = Wire(self.network, self, address, intake, self._peer)
        self._link = MemoryLink(self._wire)
        self.network.wires.append(self._wire)
