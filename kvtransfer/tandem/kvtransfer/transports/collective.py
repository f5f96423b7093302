"""`gloo` and `nccl`: payloads through a communicator of two ranks, everything else over a TCP socket beside it.

sender                                              receiver
  │ ═ control socket: both prove the cluster secret ═ │
  │ ◀────────────── window's size ─────────────────── │
  │ ◀───────────── rendezvous, both ways ───────────▶ │   makes the communicator, which then carries payloads alone
  │ ─────────────── header of frame n ──────────────▶ │   only now a receive is posted: an idle link has none pending
  │ ═══════════════ payload of frame n ═════════════▶ │   into the receiver's staging memory, in the headers' order
  │ ◀───────── reply, count of frames judged ──────── │   one at least for a quarter of the window

A communicator knows no tags and cannot skip: the payload of every announced frame is received, and dropped if it is no
longer wanted. So a cancelled transfer never puts the stream out of step.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from tandem.core.secret import ClusterSecret
from tandem.core.timeout_scale import patient
from tandem.kvtransfer.frame import (
    MAX_REPLY_BYTES,
    Frame,
    FrameReply,
    MalformedFrameError,
    encode,
)
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, Peer, patience, replies_of
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.flow_control import SendWindow
from tandem.kvtransfer.transports.gloo_communicator import SENDER_RANK, Communicator, GlooCommunicator, Transfer
from tandem.kvtransfer.transports.secret_handshake import Introduction
from tandem.kvtransfer.transports.tcp_socket import dial

MAX_FRAMES = 256
"""Frames that may wait for their reply, with and without payload. Their headers fit into the receiver's queue."""
REPORT_EVERY = 4
"""A receiver that has judged this part of the window without a reply reports it unasked. No payload is larger than
that: it, the bytes skipped before it and the unreported ones then fit into the window together."""
MAX_WINDOW_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 2 << 20
"""Each frame costs gloo several wake-ups at both ends; half as many frames gain a fifth."""
RENDEZVOUS_S = patient(20.0)
"""Longest time for the rendezvous, whatever each of its steps may take."""
WINDOW = struct.Struct("<Q")
"""The receiver's first message: the size of its staging memory, and so of the sender's."""
Connect = Callable[[ControlSocket, int, int], Communicator]


class CollectiveLink:
    """The sender's end of one connection."""

    def __init__(self, transport: str, control: ControlSocket, communicator: Communicator) -> None:
        self.transport = transport
        self._control, self._communicator = control, communicator
        size = len(communicator.staging)
        self._window = SendWindow(size, MAX_FRAMES)
        self.max_payload_bytes = min(MAX_PAYLOAD_BYTES, size // REPORT_EVERY)
        self._reserved = 0
        self._lock = threading.Lock()  # guards the one below
        self._under_way: deque[tuple[int, Transfer]] = deque()

    @classmethod
    def dial(cls, transport: str, address: str, peer: Peer, secret: ClusterSecret) -> CollectiveLink:
        """Connect, authenticate both ways and make the communicator; raises LinkClosedError."""
        connect = backend(transport)
        try:
            control = _dial_control(transport, address, peer, secret)
        except (OSError, ValueError) as error:
            raise LinkClosedError(str(error)) from error
        try:
            greeting = control.receive(WINDOW.size)
            if len(greeting) != WINDOW.size:
                raise LinkClosedError("the receiver hung up")
            (size,) = WINDOW.unpack(greeting)
            if not REPORT_EVERY <= size <= MAX_WINDOW_BYTES:
                raise LinkClosedError(f"the receiver's window has {size} bytes")
            with patience(RENDEZVOUS_S, control.hang_up):  # a timeout alone begins anew with every byte
                link = cls(transport, control, connect(control, SENDER_RANK, size))
            control.set_timeout(None)
        except (OSError, MalformedFrameError, RuntimeError) as error:  # or no thread available
            control.release()
            raise LinkClosedError(str(error)) from error
        return link

    @property
    def stalls(self) -> int:
        return self._window.stalls

    def reserve(self, size: int) -> memoryview:
        self._reserved = self._window.reserve(size)
        return self._communicator.staging[self._reserved : self._reserved + size]

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        size = 0 if payload is None else len(payload)
        number = self._window.commit(size)
        try:
            self._control.send(encode(frame))
        except OSError as error:
            raise LinkClosedError(str(error)) from error
        if size:
            with self._lock:
                self._under_way.append((number, self._communicator.send(self._reserved, size)))

    def replies(self) -> Iterator[FrameReply]:
        for reply in replies_of(lambda: self._control.receive(MAX_REPLY_BYTES)):
            self._settle(reply.consumed)
            self._window.judged(reply.consumed)
            yield reply

    def close(self) -> None:
        self._window.close()
        self._control.hang_up()

    def release(self) -> None:
        self._communicator.abort()
        self._under_way.clear()
        self._communicator.release()
        self._control.release()

    def _settle(self, judged: int) -> None:
        """Wait out the sends of the frames that the receiver is done with: their memory is about to be reused."""
        while True:
            with self._lock:
                if not self._under_way or self._under_way[0][0] > judged:
                    return
                _, transfer = self._under_way.popleft()
            transfer.wait()


def backend(transport: str) -> Connect:
    """Return the function that makes a communicator of `transport`. Raises UnavailableTransportError without one."""
    if transport == "gloo":
        return GlooCommunicator
    from tandem.kvtransfer.transports.nccl_communicator import NcclCommunicator, check_available

    check_available()
    return NcclCommunicator


def _dial_control(transport: str, address: str, peer: Peer, secret: ClusterSecret) -> ControlSocket:
    """Connect to a listener and authenticate both ways within DIAL_TIMEOUT_S. Raises OSError or ValueError."""
    words = Introduction(transport.encode(), secret, peer)
    connection = dial(address, words, time.monotonic() + DIAL_TIMEOUT_S)
    connection.settimeout(DIAL_TIMEOUT_S)
    return ControlSocket(connection)
