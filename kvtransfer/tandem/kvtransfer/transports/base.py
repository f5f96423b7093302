"""Interfaces of the two ends of every transport. `registry` makes them by name."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

from tandem.core.ids import Incarnation, Rank, WorkerId
from tandem.core.timeout_scale import patient
from tandem.kvtransfer.frame import Frame, FrameReply, MalformedFrameError, ReplyKind, decode_reply
from tandem.kvtransfer.ticket import Endpoint

MAX_PEER_BYTES = 2048
DIAL_TIMEOUT_S = patient(5.0)
WINDOW_BYTES = 4 << 20
"""Payload that may be in flight on one link before the sender waits for the receiver."""


class LinkClosedError(ConnectionError):
    """The connection ended or could not be made; carries the reason."""


class UnavailableTransportError(Exception):
    """This transport cannot work on this machine; carries the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The dialling end: one rank of a worker, and the host id that it runs on."""

    worker: WorkerId
    incarnation: Incarnation
    rank: Rank
    host: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> Peer:
        """Raises ValueError for anything but an encoded peer of bounded size."""
        if len(data) > MAX_PEER_BYTES:
            raise ValueError(f"a peer description of {len(data)} bytes")
        fields = json.loads(data)
        types = {"worker": str, "incarnation": int, "rank": int, "host": str}
        if not isinstance(fields, dict) or {k: type(v) for k, v in fields.items()} != types:
            raise ValueError("not a peer description")
        return cls(**fields)


class Listener(Protocol):
    """The receiver's side: takes connections and feeds their frames to the intake."""

    def start(self) -> None: ...

    def endpoint(self) -> Endpoint: ...

    def close(self) -> None:
        """End every connection; after return no thread of it runs."""
        ...


class Link(Protocol):
    """The sender's side of one connection. One thread reserves and commits, another reads replies."""

    @property
    def transport(self) -> str: ...

    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def stalls(self) -> int:
        """How often `reserve` had to wait for the receiver."""
        ...

    def reserve(self, size: int) -> memoryview:
        """Reserve memory for a payload of `size`; waits while the window is full. Raises LinkClosedError.

        The memory belongs to the link; a reservation that is not committed is taken back by the next one.
        """
        ...

    def commit(self, frame: Frame, payload: memoryview | None) -> None:
        """Send `frame` with the reserved payload (None: without one). Raises LinkClosedError."""
        ...

    def replies(self) -> Iterator[FrameReply]:
        """Replies as they come; raises LinkClosedError when the connection ends, with the reason."""
        ...

    def close(self) -> None:
        """End the connection from any thread; wakes both others."""
        ...

    def release(self) -> None:
        """Give back memory and descriptors, once neither of the two threads uses the link."""
        ...


def replies_of(receive: Callable[[], bytes]) -> Iterator[FrameReply]:
    """The receiver's replies as `receive` brings them, b"" at the end; raises LinkClosedError then, with the reason."""
    while True:
        try:
            data = receive()
            reply = decode_reply(data) if data else FrameReply(kind=ReplyKind.CLOSING, reason="the receiver hung up")
        except (OSError, MalformedFrameError) as error:
            raise LinkClosedError(str(error)) from error
        if reply.kind is ReplyKind.CLOSING:
            raise LinkClosedError(reply.reason)
        yield reply


@contextlib.contextmanager
def patience(limit_s: float, end: Callable[[], None]) -> Iterator[None]:
    """Call `end`, from another thread, if the block takes longer. Raises RuntimeError if no thread is available."""
    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
