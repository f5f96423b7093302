"""Places for requests of batches: how many there are, and whose turn it is.

There are as many as the gaps of interactive traffic take, none while it waits: pure arithmetic over the router's state;
the caller looks a few times a second. Tenants take turns at the next place, by the rules that requests of clients wait
by.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.core.state_enums import RoleName
from tandem.router.admission.fair_queue import FairQueue, Waiting
from tandem.router.dispatch.inflight_request import InFlightRequest
from tandem.router.workers.connection import WorkerLink

T = TypeVar("T")
QUANTUM_TOKENS = 64
SAVED_TOKENS = 2048
"""As `[admission]` has them."""
GRACE_S = 0.1
"""A request that was sent off so recently does not wait yet."""
GROW_S = 0.5
"""Undisturbed for so long: one more at once."""
YIELD_S = 1.0
"""Interactive requests that still wait after so long get the place of a running one."""


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


class Pace:
    """`look` gives how many may run; `limit` is the most that ever may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._window = 1
        self._changed_s = float("-inf")
        self._pressed_s: float | None = None

    def look(self, now_s: float, waiting: int, running: int) -> int:
        """The number that may run now, given `waiting` interactive requests and `running` ones of batches.

        While any request waits nothing new starts; after YIELD_S of that, and again every YIELD_S, one that runs has to
        stop. Afterwards the number grows from 1, by one every GROW_S in which all that may run does.
        """
        if waiting > 0:
            if self._pressed_s is None:
                self._pressed_s = now_s
                self._window = running
            elif now_s - self._pressed_s >= YIELD_S:
                self._pressed_s = now_s
                self._window = min(self._window, running) - 1
            self._window = max(0, min(self._window, running))
            self._changed_s = now_s
            return self._window
        self._pressed_s = None
        if self._window == 0:
            self._window, self._changed_s = 1, now_s
        elif running >= self._window and now_s - self._changed_s >= GROW_S:
            self._window, self._changed_s = min(self._limit, self._window + 1), now_s
        return min(self._window, self._limit)


def waiting(flights: Iterable[InFlightRequest], links: Iterable[WorkerLink], now_s: float) -> int:
    """Interactive requests that no worker computes yet: of this router, and of others as the workers report them."""
    ours = 0
    own: dict[str, int] = {}
    for flight in flights:
        has_begun = flight.prefill_started_s is not None or flight.first_token_s is not None
        if has_begun:
            continue
        if flight.is_background or now_s - flight.started_s < GRACE_S:
            where = flight.plan.decode if flight.plan.prefill is None else flight.plan.prefill
            own[where] = own.get(where, 0) + 1
        else:
            ours += 1
    others = sum(
        max(0, link.load.queued_requests - own.get(link.worker, 0))
        for link in links
        if link.facts is not None and link.facts.role is not RoleName.DECODE
    )
    return max(ours, others)
