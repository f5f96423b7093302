"""The receiver's side of `cuda_ipc` and `cpu_ipc`: one thread takes connections, one a connection reads from the ring
that its sender has passed, into memory of its own, and scatters from there."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from tandem.core.ids import BlockId
from tandem.kernels import kv_payload
from tandem.kernels.payload_checksum import payload_checksum
from tandem.kvtransfer.device_payload import DevicePayload
from tandem.kvtransfer.frame import (
    MAX_HEAD_BYTES,
    Checksum,
    Frame,
    FrameReply,
    MalformedFrameError,
    ReplyKind,
    decode,
    encode_reply,
)
from tandem.kvtransfer.host_id import host_id
from tandem.kvtransfer.kv_pool_access import DeviceAccess, PoolAccess
from tandem.kvtransfer.receiver_core import InboundLink
from tandem.kvtransfer.ticket import Endpoint
from tandem.kvtransfer.transports.base import DIAL_TIMEOUT_S, LinkClosedError
from tandem.kvtransfer.transports.device_memory import DeviceMemory, Mapping, bytes_of
from tandem.kvtransfer.transports.frame_seqlock import FrameSeqlockView
from tandem.kvtransfer.transports.ipc import (
    ALIGNMENT,
    MAX_IPC_PAYLOAD_BYTES,
    MAX_OFFER_BYTES,
    MAX_OFFER_DESCRIPTORS,
    MAX_WINDOW_BYTES,
    PRELUDE,
    READY,
    SHARE,
    WINDOW,
    aligned,
    fits,
    memory_for,
)
from tandem.kvtransfer.transports.listener_config import ListenerConfig
from tandem.kvtransfer.transports.secret_handshake import MAX_HELLO_BYTES, HandshakeListener
from tandem.kvtransfer.transports.unix_socket import UnixPort

MAX_LINKS = 256


class IpcListener:
    """Listens on a unix socket; `ring_bytes`, or what the device wants, of the sender's memory a link."""

    def __init__(self, transport: str, site: ListenerConfig) -> None:
        """Raises UnavailableTransportError where the transport cannot work."""
        self._transport, self._site = transport, site
        wanted = max(site.ring_bytes, memory_for(transport).least_window_bytes)
        self._window_bytes = min(aligned(wanted), MAX_WINDOW_BYTES)
        self._port = UnixPort(site.runtime_dir, self._run, transport=transport, limit=MAX_LINKS)

    def start(self) -> None:
        """Raises OSError."""
        self._port.open()

    def endpoint(self) -> Endpoint:
        return Endpoint(rank=self._site.rank, transport=self._transport, host=host_id(), address=self._port.address)

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        self._port.close()

    def _run(self, connection: socket.socket, admit: Callable[[], None]) -> None:
        """Serve one link, on a thread of its own. Raises OSError if it is refused."""
        connection.settimeout(DIAL_TIMEOUT_S)
        admission = HandshakeListener(self._transport.encode(), self._site.secret)
        connection.send(admission.challenge)
        peer, _, answer = admission.judge(connection.recv(MAX_HELLO_BYTES + 1))
        admit()
        connection.send(answer + WINDOW.pack(self._window_bytes))
        with self._opened(connection) as landing:
            connection.send(READY)
            connection.settimeout(None)
            self._serve(connection, self._site.intake.connect(peer), landing)

    @contextlib.contextmanager
    def _opened(self, connection: socket.socket) -> Iterator[_Landing]:
        """Map the sender's offer; unmapped at the end, which the pipe shows to the sender. Raises OSError."""
        offer, descriptors, _, _ = socket.recv_fds(
            connection, MAX_OFFER_BYTES, MAX_OFFER_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if len(descriptors) < 2 or len(offer) < WINDOW.size:
                raise LinkClosedError("the sender offered no ring")
            memory = memory_for(self._transport)
            try:
                words = FrameSeqlockView(descriptors[0])
                mapping = memory.open(offer[WINDOW.size :], descriptors[2:], self._window_bytes)
            except LinkClosedError as error:
                connection.send(str(error).encode()[: MAX_OFFER_BYTES - 1])
                raise
            try:
                yield _Landing(memory, mapping, words, self._window_bytes)
            finally:
                memory.synchronize()
                mapping.close()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _serve(self, connection: socket.socket, link: InboundLink, landing: _Landing) -> None:
        """Feed frames to the intake until the connection ends; then end it at the intake, whatever the cause."""
        intake, reason, number = self._site.intake, "the receiver broke off", 0
        try:
            while data := connection.recv(PRELUDE.size + MAX_HEAD_BYTES + 1):
                number += 1
                frame, payload = landing.payload(data, number)
                reply = intake.accept(frame, payload, link)
                connection.send(encode_reply(replace(reply, consumed=number)))
            reason = "the sender hung up"
        except MalformedFrameError as error:
            reason = f"malformed frame: {error}"
            intake.reject(link, error)
            with contextlib.suppress(OSError):  # do not wait for a sender that reads nothing
                connection.send(encode_reply(FrameReply(kind=ReplyKind.CLOSING, reason=reason)), socket.MSG_DONTWAIT)
        except OSError as error:
            reason = str(error)
        finally:
            intake.disconnect(link, reason)


class _Landing:
    """A link's mapped ring, and the receiver's own memory into which one payload after another is copied."""

    def __init__(self, memory: DeviceMemory, mapping: Mapping, words: FrameSeqlockView, size: int) -> None:
        self.memory, self.mapping, self.words, self._size = memory, mapping, words, size
        self._kept: Tensor | None = None
        self._kept_host: Tensor | None = None

    def payload(self, message: bytes, number: int) -> tuple[Frame, DevicePayload]:
        """A message's frame and where its payload lies. Raises MalformedFrameError."""
        if len(message) < PRELUDE.size:
            raise MalformedFrameError(f"a message of {len(message)} bytes")
        told, offset = PRELUDE.unpack_from(message)
        frame, rest = decode(memoryview(message)[PRELUDE.size :], MAX_IPC_PAYLOAD_BYTES)
        if len(rest):
            raise MalformedFrameError(f"{len(rest)} trailing bytes")
        size = frame.payload_bytes
        if told != number:
            raise MalformedFrameError(f"frame {told}, expected {number}")
        if offset % ALIGNMENT or offset + size > self._size or size > self._size // SHARE:
            raise MalformedFrameError(f"a payload of {size} bytes at {offset} of a ring of {self._size}")
        return frame, _IpcPayload(self, number, offset, size)

    def room(self, size: int) -> Tensor:
        """The receiver's own memory on the device; on the link's stream."""
        if self._kept is None or len(self._kept) < size:
            self._kept = self.mapping.tensor.new_empty(size)
        return self._kept[:size]

    def host_room(self, size: int) -> Tensor:
        if self._kept_host is None or len(self._kept_host) < size:
            self._kept_host = self.memory.host_buffer(size)
        return self._kept_host[:size]


class _IpcPayload(DevicePayload):
    """Copied out of the ring once, when it is first asked for: what is summed and what is scattered is that copy."""

    def __init__(self, landing: _Landing, number: int, offset: int, size: int) -> None:
        self._landing, self._number, self._offset, self._size = landing, number, offset, size
        self._landed: Tensor | None = None
        self._host: memoryview | None = None

    def __len__(self) -> int:
        return self._size

    @property
    def is_withdrawn(self) -> bool:
        return not self._landing.words.is_published(self._number)

    def suits(self, pool: PoolAccess) -> bool:
        return fits(self._landing.memory, pool)

    def scatter(self, pool: PoolAccess, blocks: Sequence[BlockId], layers: range, heads: range, kind: Checksum) -> int:
        if not isinstance(pool, DeviceAccess):
            raise ValueError("the pool does not lie on a device")
        with self._landing.memory.stream():
            pool.scatter_from(blocks, layers, heads, self._land())
        crc = self.checksum(kind)
        self._landing.memory.synchronize()
        return crc

    def checksum(self, kind: Checksum) -> int:
        if kind is Checksum.CRC32:
            return kv_payload.crc32(self.to_host())
        with self._landing.memory.stream():
            return payload_checksum(self._land())

    def to_host(self) -> memoryview:
        if self._host is None:
            room = self._landing.host_room(self._size)
            with self._landing.memory.stream():
                room.copy_(self._land(), non_blocking=True)
            self._landing.memory.synchronize()
            self._host = bytes_of(room)
        return self._host

    def _land(self) -> Tensor:
        """On the link's stream."""
        if self._landed is None:
            ring = self._landing.mapping.tensor
            self._landed = self._landing.room(self._size)
            self._landed.copy_(ring[self._offset : self._offset + self._size], non_blocking=True)
        return self._landed
