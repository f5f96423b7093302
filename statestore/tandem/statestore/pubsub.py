"""Wake-ups by publish/subscribe: a hint that something changed. Messages may get lost; every user also polls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from tandem.core.errors import UnavailableError
from tandem.core.logs import event
from tandem.statestore.connection import OUTAGE, Backoff

_log = logging.getLogger(__name__)
_LISTEN_S = 1.0


class Wakeups:
    """Listens to one channel; `run` belongs in a TaskGroup beside the loop that calls `wait`; `poll` is both."""

    def __init__(self, redis: Redis, channel: str) -> None:
        self._redis, self._channel = redis, channel
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake the waiter now."""
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next wake-up (or one since the last call), `timeout_s` at the latest."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()

    async def run(self) -> None:
        """Listen until cancelled; survives outages."""
        backoff = Backoff()
        while True:
            try:
                await self._listen(backoff)
            except OUTAGE:
                await backoff.pause()

    async def poll(self, look: Callable[[], Awaitable[None]], poll_s: float, what: str) -> None:
        """Call `look` now, after a wake-up, and every `poll_s`, until cancelled; `what` names it in an outage's log.

        An outage is an UnavailableError of `look`, which is then tried again soon.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.run())
            backoff = Backoff()
            while True:
                try:
                    await look()
                except UnavailableError as error:
                    event(_log, f"{what} not readable", logging.WARNING, why=error.why)
                    await backoff.pause()
                    continue
                backoff.reset()
                await self.wait(poll_s)

    async def _listen(self, backoff: Backoff) -> None:
        pubsub: Any = self._redis.pubsub()
        try:
            await pubsub.subscribe(self._channel)
            self.ring()  # for what was published before we listened
            while True:
                if await pubsub.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_S):
                    self.ring()
                backoff.reset()
        finally:
            await pubsub.aclose()
