"""Keeps the cluster's events: each is logged at once and stored in Redis, where they are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

from tandem.core.errors import UnavailableError
from tandem.core.events import ClusterEvent, EventKind
from tandem.core.logs import event
from tandem.statestore.stores.events import ClusterEventStore

log = logging.getLogger(__name__)

_MAX_WAITING = 256


class EventLog:
    """An EventSink. Recording never waits: `run` stores in the background; on overflow the oldest events go first."""

    def __init__(
        self,
        store: ClusterEventStore,
        *,
        on_event: Callable[[ClusterEvent], None] = lambda happened: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._on_event, self._wall_clock = store, on_event, wall_clock
        self._waiting: deque[ClusterEvent] = deque(maxlen=_MAX_WAITING)
        self._recorded = asyncio.Event()
        self._storing = asyncio.Lock()

    def record(self, kind: EventKind, subject: str, reason: str) -> None:
        happened = ClusterEvent(time_s=self._wall_clock(), kind=kind, subject=subject, reason=reason)
        event(log, str(kind), subject=subject, reason=repr(reason))
        self._on_event(happened)
        self._waiting.append(happened)
        self._recorded.set()

    async def run(self) -> None:
        """Store events until cancelled."""
        while True:
            await self._recorded.wait()
            self._recorded.clear()
            await self._store_waiting()

    async def flush(self, *, timeout_s: float = 1.0) -> None:
        """Store the waiting events, for at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._store_waiting()

    async def _store_waiting(self) -> None:
        """Store events one at a time, in order; an event leaves the queue after it was stored or could not be."""
        async with self._storing:
            while self._waiting:
                happened = self._waiting[0]
                await self._keep(happened)
                if self._waiting and self._waiting[0] is happened:
                    self._waiting.popleft()

    async def _keep(self, happened: ClusterEvent) -> None:
        try:
            await self._store.append([happened])
        except UnavailableError as error:
            event(log, "event not stored", logging.WARNING, kind=str(happened.kind), why=error.why)
