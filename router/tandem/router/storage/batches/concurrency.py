"""Places for requests of batches. Tenants take turns at the next one, by the rules that requests of clients wait by."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.router.admission.fair_queue import FairQueue, Waiting

T = TypeVar("T")
QUANTUM_TOKENS = 64
SAVED_TOKENS = 2048
"""As `[admission]` has them."""


class RevokedError(Exception):
    """The place was taken back for a waiting interactive request; the work in it was cancelled."""


class BatchSlot:
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn(Waiting):
    given: asyncio.Future[BatchSlot]


class Slots:
    """As many as the last `allow` gave. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._allowed = 0
        self._taken: list[BatchSlot] = []
        self._waiting: FairQueue[_Turn] = FairQueue(
            quantum=QUANTUM_TOKENS, limit=sys.maxsize, savings=SAVED_TOKENS
        )  # the runner of batches bounds how many ask

    @property
    def running(self) -> int:
        return len(self._taken)

    def allow(self, count: int) -> None:
        """From now on at most `count`; the youngest are taken back at once if there are more."""
        self._allowed = count
        for slot in self._taken[count:]:
            slot.revoke()
        self._grant()

    async def take(self, tenant: str, cost: int) -> BatchSlot:
        """A place for a request of about `cost` tokens, when it is its turn: first come, first served within a tenant.
        `give_back` it."""
        given: asyncio.Future[BatchSlot] = asyncio.get_running_loop().create_future()
        turn = _Turn(tenant=tenant, cost=cost, due_s=0.0, gone_s=math.inf, given=given)
        self._waiting.add(turn)
        self._grant()
        try:
            return await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.give_back(given.result())
            else:
                self._waiting.remove(turn)
            raise

    def give_back(self, slot: BatchSlot) -> None:
        self._taken.remove(slot)
        self._grant()

    def _grant(self) -> None:
        while self.running < self._allowed and (turn := self._waiting.first()) is not None:
            self._waiting.take(turn)
            if not turn.given.cancelled():
                slot = BatchSlot()
                self._taken.append(slot)
                turn.given.set_result(slot)
