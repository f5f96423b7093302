"""Places for requests of batches. Who asked first gets the next one, so batches that run side by side take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class RevokedError(Exception):
    """The place was taken back for somebody who waits; the work in it was cancelled."""


class Slot:
    """One place. What runs in it ends when the place is taken back."""

    def __init__(self) -> None:
        self._work: asyncio.Future[Any] | None = None
        self.is_revoked = False

    async def run(self, work: Awaitable[T]) -> T:
        """Do `work` here; RevokedError when the place was taken back before it was done."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._work = task
        if self.is_revoked:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling() and self.is_revoked:
                raise RevokedError from None
            task.cancel()
            raise

    def revoke(self) -> None:
        self.is_revoked = True
        if self._work is not None:
            self._work.cancel()


class Slots:
    """As many as `allow` said last. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._allowed = 0
        self._taken: list[Slot] = []
        self._waiting: deque[asyncio.Future[Slot]] = deque()

    @property
    def running(self) -> int:
        return len(self._taken)

    def allow(self, count: int) -> None:
        """From now on at most `count`; the youngest are taken back at once if there are more."""
        self._allowed = count
        for slot in self._taken[count:]:
            slot.revoke()
        self._grant()

    async def take(self) -> Slot:
        """A place, when it is the caller's turn; `give_back` it."""
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result())
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def give_back(self, slot: Slot) -> None:
        self._taken.remove(slot)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.running < self._allowed:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                slot = Slot()
                self._taken.append(slot)
                turn.set_result(slot)
