"""Inbox of the step loop, and a queue of input that cannot be handled now: in the middle of a step, or past the lease.

Messages from the host's ring and events posted by transport threads wake the loop, on one poll.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from tandem.core.errors import WorkerLostError
from tandem.core.logs import event
from tandem.engine.request import StepResult
from tandem.rpc.v1 import engine_pb2 as e
from tandem.workercore.message_ring import RingReader

_log = logging.getLogger(__name__)
MAX_MESSAGES, MAX_BYTES = 10_000, 32 << 20
"""Of messages of routers and peers, and of the host's queries and news."""
_COUNTED = ("router", "peer", "look", "link_speeds")


class Mail(Protocol):
    """Source of the step loop's input."""

    def take(self, wait_s: float) -> list[object]:
        """Take everything that is here, events first; waits up to `wait_s` for something (0 = do not wait)."""


@dataclass(frozen=True, slots=True)
class Inbox:
    """`post` may be called from any thread; everything else belongs to the step loop."""

    ring: RingReader
    posted: deque[object]
    wake: int

    @classmethod
    def open(cls, ring: RingReader) -> Inbox:
        return cls(ring, deque(), os.eventfd(0, os.EFD_NONBLOCK))

    def post(self, event: object) -> None:
        """Hand over an event from another thread and wake the loop."""
        self.posted.append(event)
        os.eventfd_write(self.wake, 1)

    def take(self, wait_s: float) -> list[object]:
        """Take everything that is here, events first; waits up to `wait_s` for something (0 = do not wait)."""
        if not self.posted and wait_s > 0:
            select.select([self.ring.filled, self.wake], [], [], wait_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        items: list[object] = []
        while self.posted:
            items.append(self.posted.popleft())
        for data in self.ring.read_all():
            try:
                items.append(e.HostToRank.FromString(data))
            except DecodeError:  # the host has parsed it; but it is nested deeper here than there
                event(_log, "message cannot be parsed", logging.WARNING, bytes=len(data))
        return items

    def close(self) -> None:
        self.ring.close()
        os.close(self.wake)


class Deferred:
    """Bounded queue of deferred input, in order. Belongs to the step loop.

    Messages that others can send at any rate are bounded. In a step, the loop takes no more once it `is_full`: the rest
    waits in the ring and at the host, which then ends the streams that send too much. Past the lease everything must be
    taken, for the message that makes the rank another incarnation comes last: the excess is then void, as all of it
    will be with that message, and the rank cannot go on under its old incarnation. The rest is few: the loss of a
    router or peer is kept once, transfers end once each, and none begins past the lease.
    """

    def __init__(self, max_messages: int = MAX_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._items: deque[object] = deque()
        self._messages = self._bytes = self._dropped = 0
        self._has_incarnation = False
        self._gone: dict[tuple[str, str], set[int]] = {}
        """Incarnations of routers and peers that are gone, without a message since."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[object]:
        return iter(self._items)

    @property
    def is_full(self) -> bool:
        """True if nothing more may be taken that can wait elsewhere."""
        return self._messages >= self._max_messages or self._bytes >= self._max_bytes

    def append(self, item: object) -> None:
        """Keep it, unless it repeats an earlier message, or its kind is void."""
        if isinstance(item, e.HostToRank):
            kind = item.WhichOneof("kind")
            if kind == "incarnation":
                self._has_incarnation = True
                self._dropped = 0  # later messages are for that one
                self._gone.clear()
            elif kind in _COUNTED:
                if self._dropped:
                    self._dropped += 1
                    return
                self._messages += 1
                self._bytes += item.ByteSize()
                self._gone.pop(_who(item), None)
            elif kind in ("router_gone", "peer_gone"):
                incarnations = self._gone.setdefault(_who(item), set())
                if item.peer_gone.incarnation in incarnations:
                    return
                incarnations.add(item.peer_gone.incarnation)
        self._items.append(item)

    def void(self) -> None:
        """Past the lease: drop messages of routers and peers, and all later ones until there is another incarnation."""
        dropped = self._messages
        self._items = deque(item for item in self._items if not _is_counted(item))
        event(_log, "messages dropped without a lease", logging.WARNING, messages=dropped, bytes=self._bytes)
        self._dropped += dropped
        self._messages = self._bytes = 0

    def take(self) -> list[object]:
        """Return everything, to be handled. Raises WorkerLostError if a message to this incarnation was dropped: it
        would stay unanswered."""
        if self._dropped:
            what = f"{self._dropped} messages that arrived without a lease were dropped"
            raise WorkerLostError(what, why="the lease was renewed afterwards", todo="the worker is restarted")
        items = list(self._items)
        self._clear()
        return items

    def take_invalidated(self) -> list[object]:
        """Return everything up to and with the last message that makes this another incarnation, without messages of
        routers and peers to the one before and results of its last step; nothing if there is no such message."""
        if not self._has_incarnation:
            return []
        items = list(self._items)
        last = max(place for place, item in enumerate(items) if _is_incarnation(item))
        self._clear()
        for item in items[last + 1 :]:
            self.append(item)
        return [item for item in items[: last + 1] if not _is_void(item)]

    def _clear(self) -> None:
        self._items.clear()
        self._gone.clear()
        self._messages = self._bytes = 0
        self._has_incarnation = False


def _is_counted(item: object) -> bool:
    return isinstance(item, e.HostToRank) and item.WhichOneof("kind") in _COUNTED


def _who(item: e.HostToRank) -> tuple[str, str]:
    """The router, or the peer, that sent this or is gone."""
    return (item.router.router or item.router_gone.router, item.peer.worker or item.peer_gone.worker)


def _is_incarnation(item: object) -> bool:
    return isinstance(item, e.HostToRank) and item.HasField("incarnation")


def _is_void(item: object) -> bool:
    is_said = isinstance(item, e.HostToRank) and item.WhichOneof("kind") in ("router", "peer")
    return is_said or isinstance(item, StepResult)
