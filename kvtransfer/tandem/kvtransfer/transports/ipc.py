"""`cuda_ipc` and its twin on the host, `cpu_ipc`: payloads are gathered into a ring in the sender's device memory, that
the receiver has mapped; headers and replies go over a unix SOCK_SEQPACKET socket.

sender                                                          receiver
  │ ◀════════ both prove the secret; size of the ring ════════════ │
  │ ─────────── handle of the ring; page of words; a pipe ───────▶ │   maps both, keeps the pipe while it does
  │ ◀───────────────────────── ready ───────────────────────────── │
  │ ═ gather into the ring, checksum there, publish the word ═     │   then the source may be given to others
  │ ─────────────── frame's number, offset, header ──────────────▶ │
  │                 ═ copy into its own memory, checksum, scatter ═ │   then the word again: withdrawn? given to others?
  │ ◀───────────────── reply, count of frames judged ───────────── │   clears the word, then the place is free

The ring is freed when the pipe shows that the receiver has unmapped it, or is dead: never while it may be read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator

from torch import Tensor

from tandem.core.ids import Attempt, TransferId
from tandem.core.secret import ANSWER_BYTES, NONCE_BYTES, ClusterSecret
from tandem.kernels.payload_checksum import payload_checksum
from tandem.kvtransfer.device_payload import DeviceLink, DeviceRoom
from tandem.kvtransfer.frame import (
    MAX_REPLY_BYTES,
    Checksum,
    Frame,
    FrameReply,
    encode,
)
from tandem.kvtransfer.kv_pool_access import DeviceAccess, PoolAccess, TokenRun
from tandem.kvtransfer.transports.acceptor import hang_up
from tandem.kvtransfer.transports.base import (
    DIAL_TIMEOUT_S,
    LinkClosedError,
    Peer,
    UnavailableTransportError,
    replies_of,
)
from tandem.kvtransfer.transports.device_memory import DeviceMemory, HostMemory, Staging, bytes_of
from tandem.kvtransfer.transports.flow_control import SendWindow
from tandem.kvtransfer.transports.frame_seqlock import MAX_FRAMES, FrameSeqlock
from tandem.kvtransfer.transports.secret_handshake import Introduction
from tandem.kvtransfer.transports.unix_socket import socket_name

ALIGNMENT = 256
MAX_IPC_PAYLOAD_BYTES = 16 << 20
"""More than of other transports: a payload takes no memory before it is judged, and small ones cost launches."""
SHARE = 4
"""A payload is no larger than this part of the ring, so that one is gathered while another is read."""
MAX_WINDOW_BYTES = 256 << 20
WINDOW = struct.Struct("<Q")
PRELUDE = struct.Struct("<QQ")
"""Before each header: the frame's number from 1, and the offset of its payload."""
READY = b"ready"
MAX_OFFER_BYTES = 1024
MAX_OFFER_DESCRIPTORS = 4
WAKE_S = 0.25
"""How long a receiver gets to unmap the ring before that is left to a thread."""
Claim = tuple[TransferId, Attempt]


def memory_for(transport: str) -> DeviceMemory:
    """This process's device, with a stream for one end of a link. Raises UnavailableTransportError."""
    if transport == "cpu_ipc":
        return HostMemory()
    if transport != "cuda_ipc":
        raise UnavailableTransportError(f"no device memory for {transport}")
    from tandem.kvtransfer.transports.cuda_memory import CudaMemory

    return CudaMemory()


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def fits(memory: DeviceMemory, pool: PoolAccess) -> bool:
    """True if `pool` lies on the device itself."""
    return isinstance(pool, DeviceAccess) and pool.device == str(memory.device)


class IpcLink(DeviceLink):
    """The sender's end of one connection."""

    def __init__(self, transport: str, connection: socket.socket, ring: Ring) -> None:
        self.transport, self._socket, self._ring = transport, connection, ring
        size = ring.staging.tensor.numel()
        self._window = SendWindow(size, MAX_FRAMES)
        self.max_payload_bytes = min(MAX_IPC_PAYLOAD_BYTES, size // SHARE)
        self._offset = 0  # of the room reserved last
        self._bounce: Tensor | None = None
        self._lock = threading.Lock()  # guards words and what follows; never held while another is waited for
        self._under_way: deque[tuple[int, Claim]] = deque()
        self._claim: Claim | None = None
        self._is_claim_withdrawn = False

    @classmethod
    def dial(cls, transport: str, address: str, peer: Peer, secret: ClusterSecret) -> IpcLink:
        """Connect, authenticate both ways and pass the ring within DIAL_TIMEOUT_S each; raises LinkClosedError, also if
        the receiver cannot map the ring, and UnavailableTransportError."""
        memory = memory_for(transport)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(DIAL_TIMEOUT_S)
            connection.connect(socket_name(address))
            ring = Ring(memory, _introduce(transport, connection, peer, secret))
        except OSError as error:
            connection.close()
            raise LinkClosedError(str(error)) from error
        try:
            ring.offer(connection)
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            ring.free()
            raise LinkClosedError(str(error)) from error
        return cls(transport, connection, ring)

    @property
    def stalls(self) -> int:
        return self._window.stalls

    def suits(self, pool: PoolAccess) -> bool:
        return fits(self._ring.memory, pool)

    def reserve(self, size: int) -> memoryview:
        """Host memory, from which `commit` copies to the device: for what is not there, or in another form."""
        self._reserve(size)
        if self._bounce is None:
            self._bounce = self._ring.memory.host_buffer(self.max_payload_bytes)
        return bytes_of(self._bounce)[:size]

    def reserve_on_device(self, size: int) -> DeviceRoom:
        self._reserve(size)
        return _Room(self._ring, self._offset, size)

    def claim(self, transfer: TransferId, attempt: Attempt) -> None:
        with self._lock:
            self._claim, self._is_claim_withdrawn = (transfer, attempt), False

    def withdraw(self, transfer: TransferId, attempt: Attempt) -> None:
        with self._lock:
            for number, claim in self._under_way:
                if claim == (transfer, attempt):
                    self._ring.words.clear(number)
            if self._claim == (transfer, attempt):
                self._is_claim_withdrawn = True

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        size = 0 if payload is None else len(payload)
        if size and self._bounce is not None:
            memory = self._ring.memory
            with memory.stream():
                room = self._ring.staging.tensor[self._offset : self._offset + size]
                room.copy_(self._bounce[:size], non_blocking=True)
            memory.synchronize()
        self._send(frame, size)

    def commit_on_device(self, frame: Frame, room: DeviceRoom) -> None:
        self._send(frame, len(room))

    def replies(self) -> Iterator[FrameReply]:
        for reply in replies_of(lambda: self._socket.recv(MAX_REPLY_BYTES + 1)):
            with self._lock:
                while self._under_way and self._under_way[0][0] <= reply.consumed:
                    self._ring.words.clear(self._under_way.popleft()[0])
            self._window.judged(reply.consumed)
            yield reply

    def close(self) -> None:
        self._window.close()
        hang_up(self._socket)

    def release(self) -> None:
        self._socket.close()
        self._ring.free()

    def _reserve(self, size: int) -> None:
        """Raises LinkClosedError."""
        self._offset = self._window.reserve(aligned(size))
        with self._lock:
            self._claim, self._is_claim_withdrawn = None, False

    def _send(self, frame: Frame, size: int) -> None:
        number = self._window.commit(aligned(size))
        if size:
            with self._lock:
                if not self._is_claim_withdrawn:
                    self._ring.words.publish(number)
                self._under_way.append((number, (frame.transfer, frame.attempt)))
                self._claim = None
        try:
            self._socket.send(PRELUDE.pack(number, self._offset if size else 0) + encode(frame))
        except OSError as error:
            raise LinkClosedError(str(error)) from error


class _Room(DeviceRoom):
    def __init__(self, ring: Ring, offset: int, size: int) -> None:
        self._ring, self._offset, self._size = ring, offset, size

    def __len__(self) -> int:
        return self._size

    def gather(
        self, pool: PoolAccess, source: TokenRun, layers: range, heads: range, target_tokens: int
    ) -> tuple[int, Checksum]:
        if not isinstance(pool, DeviceAccess):
            raise ValueError("the pool does not lie on a device")
        out = self._ring.staging.tensor[self._offset : self._offset + self._size]
        with self._ring.memory.stream():
            pool.gather_into(source, layers, heads, out, target_tokens=target_tokens)
        return self.checksum()

    def checksum(self) -> tuple[int, Checksum]:
        with self._ring.memory.stream():
            crc = payload_checksum(self._ring.staging.tensor[self._offset : self._offset + self._size])
        self._ring.memory.synchronize()
        return crc, Checksum.DEVICE


class Ring:
    """The sender's ring, its page of words, and a pipe: the receiver holds its other end while it maps the ring."""

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        """Raises OSError."""
        self.memory = memory
        self.staging: Staging = memory.allocate(size)
        with contextlib.ExitStack() as undo:
            undo.callback(self.staging.free)
            self._gone, self._held = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, self._gone)
            undo.callback(os.close, self._held)
            self.words = FrameSeqlock()
            undo.pop_all()

    def offer(self, connection: socket.socket) -> None:
        """Pass it on and wait until the peer has mapped it. Raises OSError."""
        descriptors = [self.words.descriptor, self._held, *self.staging.descriptors]
        try:
            socket.send_fds(connection, [WINDOW.pack(self.staging.tensor.numel()) + self.staging.handle], descriptors)
        finally:
            self.words.close_descriptor()
            os.close(self._held)
        answer = connection.recv(MAX_OFFER_BYTES)
        if answer != READY:
            raise LinkClosedError(answer.decode(errors="replace") or "the receiver hung up")

    def free(self) -> None:
        """Give the memory back once the receiver has unmapped it; waits WAKE_S, then leaves it to a thread, which ends
        with the receiver at the latest. Until then a receiver that is stopped, or copies, still reads it."""
        if self._is_unmapped(WAKE_S):
            self._release()
        else:
            threading.Thread(target=self._free_later, name="kv-ipc-free", daemon=True).start()

    def _free_later(self) -> None:
        self._is_unmapped(None)
        self._release()

    def _is_unmapped(self, within_s: float | None) -> bool:
        """True if the receiver no longer holds the other end of the pipe."""
        poll = select.poll()
        poll.register(self._gone, select.POLLIN)
        return bool(poll.poll(None if within_s is None else within_s * 1000))

    def _release(self) -> None:
        os.close(self._gone)
        self.memory.synchronize()
        self.staging.free()
        self.words.close()


def _introduce(transport: str, connection: socket.socket, peer: Peer, secret: ClusterSecret) -> int:
    """The dialler's part of the handshake; the size that the ring is to have. Raises OSError."""
    words = Introduction(transport.encode(), secret, peer)
    connection.send(words.hello(connection.recv(NONCE_BYTES + 1)))
    message = connection.recv(ANSWER_BYTES + WINDOW.size + 1)
    words.check(message[:ANSWER_BYTES])
    with contextlib.suppress(struct.error):
        (size,) = WINDOW.unpack(message[ANSWER_BYTES:])
        if ALIGNMENT * SHARE <= size <= MAX_WINDOW_BYTES and size % ALIGNMENT == 0:
            return int(size)
    raise LinkClosedError("the receiver asks for a ring of an invalid size")
