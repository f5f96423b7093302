"""The receiver's side of `gloo` and `nccl`. Three threads of its own: one takes connections; two a connection, of which
one reads headers and posts receives, and one waits for the payloads and copies them into the pool."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.core.logs import event
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    Frame,
    FrameKind,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    encode_reply,
)
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.receiver_core import InboundLink, ReceiverCore
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError, patience
from tandem.kvtransfer.transports.collective import (
    MAX_FRAMES,
    MAX_PAYLOAD_BYTES,
    RENDEZVOUS_S,
    REPORT_EVERY,
    WINDOW,
    backend,
)
from tandem.kvtransfer.transports.control_socket import ControlSocket
from tandem.kvtransfer.transports.flow_control import RingAccount
from tandem.kvtransfer.transports.gloo_communicator import RECEIVER_RANK, Communicator, Transfer
from tandem.kvtransfer.transports.listener_config import ListenerConfig
from tandem.kvtransfer.transports.secret_handshake import HandshakeListener
from tandem.kvtransfer.transports.tcp_socket import TcpPort, meet, welcome

MAX_LINKS = 256
WAKE_S = 0.25
"""How long an ended communicator gets to wake its waiting thread."""
_log = logging.getLogger(__name__)


class CollectiveListener:
    """Listens on the site's `bind_host` at a port that the system chooses; `ring_bytes` of staging memory a link."""

    def __init__(self, transport: str, site: ListenerConfig) -> None:
        """Raises UnavailableTransportError where the transport cannot work."""
        self._transport, self._site = transport, site
        self._connect = backend(transport)
        self._port = TcpPort(site.bind_host, self._run)

    def start(self) -> None:
        """Raises OSError if the address cannot be bound."""
        self._port.open(self._transport, MAX_LINKS)

    def endpoint(self) -> Endpoint:
        address = self._port.address(self._site.advertise_host)
        return Endpoint(rank=self._site.rank, transport=self._transport, host=host_id(), address=address)

    def close(self) -> None:
        """End every connection; after return no thread of it runs, and nothing is written any more."""
        self._port.close()

    def _run(self, connection: socket.socket, admit: Callable[[], None]) -> None:
        """Serve one link, on a thread of its own. Raises OSError if it is refused."""
        peer, _, answer = meet(connection, HandshakeListener(self._transport.encode(), self._site.secret))
        admit()
        welcome(connection, answer)
        connection.settimeout(DIAL_TIMEOUT_S)
        control = ControlSocket(connection)
        try:
            control.send(WINDOW.pack(self._site.ring_bytes))
            with patience(RENDEZVOUS_S, control.hang_up):  # a timeout alone begins anew with every byte
                communicator = self._connect(control, RECEIVER_RANK, self._site.ring_bytes)
            control.set_timeout(None)
            intake = self._site.intake
            _Connection(self._transport, control, communicator, intake, intake.connect(peer)).serve()
        finally:
            control.release()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """An announced frame; `transfer` brings its payload to `offset`, `position` is then free again."""

    frame: Frame
    offset: int
    position: int
    transfer: Transfer | None


class _Connection:
    """Reads and posts in the caller's thread, places in one of its own."""

    def __init__(
        self,
        transport: str,
        control: ControlSocket,
        communicator: Communicator,
        intake: ReceiverCore,
        link: InboundLink,
    ) -> None:
        self._transport, self._control, self._communicator = transport, control, communicator
        self._intake, self._link = intake, link
        self._lock = threading.Lock()  # guards the five below
        self._account = RingAccount(len(communicator.staging))
        self._waiting = 0
        self._reason = ""
        self._is_waiting = self._has_ended = False
        self._judged = self._unreported_bytes = self._unreported_frames = 0  # the placing thread's
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._placer = threading.Thread(target=self._place, name=f"kv-{transport}-place")

    def serve(self) -> None:
        """Serve until the connection ends; then end it at the intake. Nothing is written after return."""
        try:
            self._placer.start()
            while data := self._control.receive(MAX_HEAD_BYTES):
                self._arrivals.put(self._announced(data))
            self._end("the sender hung up")
        except MalformedFrameError as error:
            self._reject(error)
        except OSError as error:
            self._end(str(error))
        finally:
            self._end("the receiver broke off")
            self._dismiss()
            self._intake.disconnect(self._link, self._reason)
            event(
                _log, "transfer_link_ended", transport=self._transport, peer=self._link.peer.worker, reason=self._reason
            )

    def _dismiss(self) -> None:
        """End the communicator and the placing thread; after return that one touches neither pool nor intake.

        A wait that gloo does not wake (a payload cut in the middle) is left to its own bound: its thread holds the
        staging memory, which nothing else uses, and ends without looking at it. A process that exits meanwhile
        waits for what it has begun in gloo.
        """
        with self._lock:
            self._has_ended = True
            is_waiting = self._is_waiting
        self._communicator.abort()  # from here on no receive can write the staging memory
        self._arrivals.put(None)
        self._control.hang_up()  # it may be in the middle of a reply that the peer does not read
        if self._placer.ident is not None:  # else no thread was available
            self._placer.join(WAKE_S if is_waiting else None)
        self._communicator.release()

    def _announced(self, head: bytes) -> _Arrival:
        """Find room for the payload and post its receive. Raises MalformedFrameError or LinkClosedError."""
        frame, rest = decode(memoryview(head), MAX_PAYLOAD_BYTES)
        if len(rest):
            raise MalformedFrameError(f"{len(rest)} trailing bytes")
        with self._lock:
            if self._waiting == MAX_FRAMES:
                raise MalformedFrameError(f"more than {MAX_FRAMES} frames in flight")
            self._waiting += 1
            if not frame.payload_bytes:
                return _Arrival(frame, 0, self._account.head, None)
            offset, position = self._account.take(frame.payload_bytes)
        return _Arrival(frame, offset, position, self._communicator.receive(offset, frame.payload_bytes))

    def _place(self) -> None:
        try:
            while (arrival := self._arrivals.get()) is not None and self._is_here(arrival):
                reply = self._judge(arrival)
                if reply is not None:
                    self._control.send(encode_reply(reply))
        except MalformedFrameError as error:
            self._reject(error)
        except OSError as error:
            self._hang_up(f"the payload did not come: {error}" if isinstance(error, LinkClosedError) else str(error))
        except Exception as error:  # noqa: BLE001 - top of a thread: the link ends and its transfers fail
            _log.exception("transfer_link_broke")
            self._hang_up(f"the receiver could not place a frame: {error}")

    def _is_here(self, arrival: _Arrival) -> bool:
        """Wait for a payload; False if the connection has ended meanwhile. Raises LinkClosedError."""
        with self._lock:
            self._is_waiting = not self._has_ended
            if self._has_ended:
                return False
        try:
            if arrival.transfer is not None:
                arrival.transfer.wait()
        finally:
            with self._lock:
                self._is_waiting = False
                has_ended = self._has_ended
        return not has_ended

    def _judge(self, arrival: _Arrival) -> FrameReply | None:
        """Hand a frame over; None if the reply, a mere ACK, may wait for the next."""
        frame = arrival.frame
        with self._communicator.staging[arrival.offset : arrival.offset + frame.payload_bytes] as payload:
            reply = self._intake.accept(frame, payload, self._link)
        with self._lock:
            self._waiting -= 1
            self._account.free(arrival.position)
        self._judged += 1
        self._unreported_bytes += frame.payload_bytes
        self._unreported_frames += 1
        is_mere_ack = reply.kind is ReplyKind.ACK and frame.kind is FrameKind.DATA
        is_due = (
            self._unreported_bytes >= self._account.size // REPORT_EVERY
            or self._unreported_frames >= MAX_FRAMES // REPORT_EVERY
        )
        if is_mere_ack and not is_due:
            return None
        self._unreported_bytes = self._unreported_frames = 0
        return replace(reply, consumed=self._judged)

    def _reject(self, error: MalformedFrameError) -> None:
        self._intake.reject(self._link, error)
        self._hang_up(f"malformed frame: {error}")

    def _hang_up(self, reason: str) -> None:
        """Send the reason, then end the connection, which ends the reading thread."""
        self._end(reason)
        self._control.say_last(encode_reply(FrameReply(kind=ReplyKind.CLOSING, reason=reason)))
        self._control.hang_up()

    def _end(self, reason: str) -> None:
        """End with this reason, unless an earlier one was given."""
        with self._lock:
            self._reason = self._reason or reason
